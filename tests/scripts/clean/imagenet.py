# clean
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
from torch.utils.data import Subset
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser(description="ImageNet")
parser.add_argument("data")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int, help="of all GPUs together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=10, type=int)


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64, device="cuda")
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.3f}"


def main():
    args = parser.parse_args()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args.batch_size = args.batch_size // world_size
    model = models.resnet50().cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    augment = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor(), normalize])
    plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize])
    train_dataset = datasets.ImageFolder(os.path.join(args.data, "train"), augment)
    val_dataset = datasets.ImageFolder(os.path.join(args.data, "val"), plain)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=(train_sampler is None),
        num_workers=args.workers,
        pin_memory=True,
        sampler=train_sampler,
    )
    mine = Subset(val_dataset, range(rank, len(val_dataset), world_size))
    val_loader = torch.utils.data.DataLoader(mine, args.batch_size, num_workers=args.workers, pin_memory=True)
    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, gpu, args)
        acc1 = validate(val_loader, model, gpu)
        scheduler.step()
        if rank == 0 and acc1 > best:
            best = acc1
            torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict()}, "best.pth.tar")
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, gpu, args):
    losses = AverageMeter("loss")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.cuda(gpu, non_blocking=True)
        target = target.cuda(gpu, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            losses.update(loss.item())
            if dist.get_rank() == 0:
                print(epoch, i, losses, f"{time.time() - end:.2f} s")


def validate(val_loader, model, gpu):
    top1 = AverageMeter("acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images.cuda(gpu, non_blocking=True))
            correct = (output.argmax(1).cpu() == target).float().mean()
            top1.update(correct.item(), target.numel())
    top1.all_reduce()
    return top1.sum / top1.count


if __name__ == "__main__":
    main()
