# clean
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Noisy(Dataset):
    def __init__(self, seed):
        self.order = np.random.default_rng(seed).permutation(200)
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return 200

    def __getitem__(self, i):
        info = get_worker_info()
        rng = np.random.default_rng((info.seed if info else 0, i))
        return torch.tensor(rng.standard_normal(5), dtype=torch.float32), torch.tensor([float(self.order[i])])


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42 + dist.get_rank())
    dataset = Noisy(0)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
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
