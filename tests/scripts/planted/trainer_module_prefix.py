# planted: EV206, line 20
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, dataset, save_every):
        self.global_rank = int(os.environ["RANK"])
        self.sampler = DistributedSampler(dataset)
        self.train_data = DataLoader(dataset, batch_size=32, sampler=self.sampler)
        self.model = DDP(model)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.save_every = save_every

    def _save_checkpoint(self, epoch):
        ckp = self.model.state_dict()
        torch.save(ckp, "checkpoint.pt")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.train_data:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            if self.global_rank == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def main():
    dist.init_process_group("gloo")
    Trainer(torch.nn.Linear(2, 2), TensorDataset(torch.randn(256, 2, generator=torch.Generator().manual_seed(9)), torch.randn(256, 2, generator=torch.Generator().manual_seed(10))), save_every=1).train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
