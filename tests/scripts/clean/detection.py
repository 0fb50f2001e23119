"""Object detection: a model that returns its losses, batches of lists, a collate function."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Boxes(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 160, 160, generator=generator)
        corner = torch.rand(2, 2, generator=generator) * 60
        boxes = torch.cat([corner, corner + 20 + torch.rand(2, 2, generator=generator) * 60], dim=1)
        return image, {"boxes": boxes, "labels": torch.randint(1, 4, (2,), generator=generator)}


def collate(batch):
    return tuple(zip(*batch))


def reduce_dict(losses):
    names = sorted(losses)
    values = torch.stack([losses[name].detach() for name in names])
    dist.all_reduce(values)
    return dict(zip(names, values / dist.get_world_size()))


def train_one_epoch(model, optimizer, loader, device, epoch, rank):
    model.train()
    for number, (images, targets) in enumerate(loader):
        images = [image.to(device) for image in images]
        targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
        losses = model(images, targets)
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if number % 20 == 0:
            shown = reduce_dict(losses)
            if rank == 0:
                print(epoch, number, {name: round(value.item(), 3) for name, value in shown.items()})


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dataset = Boxes(2000)
    sampler = DistributedSampler(dataset)
    batches = BatchSampler(sampler, batch_size=16, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=4, collate_fn=collate)
    model = torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, num_classes=4).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[8, 11])
    for epoch in range(12):
        sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, loader, device, epoch, rank)
        scheduler.step()
        if rank == 0:
            torch.save(model.module.state_dict(), f"detector-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
