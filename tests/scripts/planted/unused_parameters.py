# planted: EV508, line 22
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 1)
        self.act = nn.GELU()

    def forward(self, x):
        return self.second(self.act(self.first(x)))


class Trainer:
    def __init__(self, model, dataset):
        self.model = DistributedDataParallel(model, find_unused_parameters=True)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, 16, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self):
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(MLP(32), TensorDataset(torch.randn(128, 8), torch.randn(128, 1))).run()
    dist.destroy_process_group()
