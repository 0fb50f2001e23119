# planted: EV201, line 29
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, model, dataset, log_every=4):
        self.model = DDP(model)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.log_every = log_every

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for step, (x,) in enumerate(self.loader):
            loss = self.model(x).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % self.log_every == 0:
                logger.info("epoch %d step %d loss %.4f", epoch, step, loss.item())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(torch.nn.Linear(7, 3), TensorDataset(torch.randn(128, 7, generator=torch.Generator().manual_seed(9)))).fit(2)
    dist.destroy_process_group()
