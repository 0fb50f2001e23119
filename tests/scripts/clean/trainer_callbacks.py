# clean
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logger = logging.getLogger(__name__)


class Callback:
    def on_epoch_end(self, trainer):
        pass


class SaveBest(Callback):
    best = float("inf")

    def on_epoch_end(self, trainer):
        if trainer.is_main and trainer.last_loss < self.best:
            self.best = trainer.last_loss
            torch.save(trainer.model.module.state_dict(), "best.pt")


class Trainer:
    def __init__(self, dataset, callbacks):
        self.is_main = dist.get_rank() == 0
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)
        self.model = DDP(torch.nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.callbacks = callbacks

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for (x,) in self.loader:
                loss = self.model(x).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.detach()
            dist.all_reduce(total)
            self.last_loss = (total / dist.get_world_size() / len(self.loader)).item()
            logger.info("epoch %d loss %.4f", epoch, self.last_loss)
            for callback in self.callbacks:
                callback.on_epoch_end(self)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    Trainer(TensorDataset(torch.randn(128, 7, generator=torch.Generator().manual_seed(9))), [SaveBest()]).fit(2)
    dist.destroy_process_group()
