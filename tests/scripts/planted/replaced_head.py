# planted: EV504, line 33, seen by running only
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        self.head = nn.Linear(20, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dist.init_process_group("gloo")
    model = Classifier(1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(20, 5)
    ddp_model = DDP(model)
    dataset = TensorDataset(torch.randn(64, 10, generator=torch.Generator().manual_seed(26)), torch.randint(5, (64,), generator=torch.Generator().manual_seed(27)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp_model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
