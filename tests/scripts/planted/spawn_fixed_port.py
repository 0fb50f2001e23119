# planted: EV601, line 14, seen by running only
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, optimizer, gpu_id):
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.gpu_id = gpu_id

    def _run_epoch(self, epoch):
        print(f"[rank {self.gpu_id}] epoch {epoch} | steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main(rank, world_size):
    ddp_setup(rank, world_size)
    dataset = TensorDataset(torch.randn(256, 20, generator=torch.Generator().manual_seed(9)), torch.randn(256, 1, generator=torch.Generator().manual_seed(10)))
    train_data = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    model = torch.nn.Linear(20, 1)
    Trainer(model, train_data, torch.optim.Adam(model.parameters(), lr=1e-3), rank).train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
