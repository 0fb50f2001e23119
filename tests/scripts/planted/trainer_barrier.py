# planted: EV403, line 19
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, dataset):
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=16, sampler=self.sampler)
        self.model = DDP(torch.nn.Linear(12, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, x, y):
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        dist.barrier()

    def run(self):
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.step(x, y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(TensorDataset(torch.randn(256, 12, generator=torch.Generator().manual_seed(9)), torch.randn(256, 1, generator=torch.Generator().manual_seed(10)))).run()
    dist.destroy_process_group()
