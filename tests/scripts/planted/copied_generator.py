# planted: EV108, line 26, seen by running only
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RandomCrops(Dataset):
    def __init__(self, num, seed):
        self.signals = torch.randn(num, 64)
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        start = int(self.rng.integers(0, 32))
        return self.signals[index, start : start + 32]


def main():
    dist.init_process_group("gloo")
    dataset = RandomCrops(400, seed=dist.get_rank())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler, num_workers=2)
    model = DDP(torch.nn.Linear(32, 32))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for crop in loader:
            optimizer.zero_grad()
            (model(crop) - crop).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


main()
