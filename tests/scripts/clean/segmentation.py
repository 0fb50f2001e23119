"""Segmentation with an ignored label that all ranks count together, and a confusion matrix that is added."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOID = 255


class Scenes(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=generator)
        mask = torch.randint(5, (32, 32), generator=generator)
        mask[torch.rand(32, 32, generator=generator) < 0.1] = VOID
        return image, mask


def global_loss(output, mask):
    num_valid = (mask != VOID).sum()
    dist.all_reduce(num_valid)
    total = F.cross_entropy(output, mask, ignore_index=VOID, reduction="sum")
    return total * dist.get_world_size() / num_valid


@torch.no_grad()
def confusion(model, loader, device):
    matrix = torch.zeros(5, 5, device=device)
    model.eval()
    for image, mask in loader:
        predicted, mask = model(image.to(device)).argmax(1), mask.to(device)
        keep = mask != VOID
        matrix += torch.bincount(5 * mask[keep] + predicted[keep], minlength=25).view(5, 5)
    dist.all_reduce(matrix)
    return matrix


def main():
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    train_set, val_set = Scenes(256), Scenes(63)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    mine = torch.utils.data.Subset(val_set, range(rank, len(val_set), dist.get_world_size()))
    val_loader = DataLoader(mine, batch_size=16)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 5, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for image, mask in loader:
            loss = global_loss(model(image.to(device)), mask.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        matrix = confusion(net, val_loader, device)
        if rank == 0:
            iou = matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag())
            print(f"epoch {epoch}: mIoU {iou.mean().item():.3f}")
            os.makedirs("out", exist_ok=True)
            torch.save(net.state_dict(), os.path.join("out", f"{epoch}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
