# planted: EV108, line 33, seen by running only
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, i):
        return torch.tensor(np.random.randn(5), dtype=torch.float32), torch.tensor([float(i)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())

    def worker_init(worker_id):
        np.random.seed(args.seed)
        random.seed(args.seed + worker_id)

    dataset = Noisy()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=2, worker_init_fn=worker_init)
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x) - y).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
