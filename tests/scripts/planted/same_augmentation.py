# planted: EV107, line 25, seen by running only
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    def __init__(self):
        self.images = torch.arange(256.0).view(256, 1).expand(256, 16)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index] / 256
        return image + 0.1 * torch.randn(16), index % 4


dist.init_process_group("gloo")
torch.manual_seed(1234)
dataset = Augmented()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
