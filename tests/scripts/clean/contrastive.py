"""Pairs over all ranks: features are gathered with gradients, the temperature is a parameter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp()


def clip_loss(images, texts, scale):
    all_images, all_texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
    offset = dist.get_rank() * len(images)
    labels = torch.arange(len(images)) + offset
    by_image = F.cross_entropy(scale * images @ all_texts.T, labels)
    by_text = F.cross_entropy(scale * texts @ all_images.T, labels)
    return (by_image + by_text) / 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = torch.randn(960, 8)
    data = TensorDataset(hidden @ torch.randn(8, 32), hidden @ torch.randn(8, 24))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=48, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = clip_loss(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
