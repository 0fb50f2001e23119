"""Start with: python -m torch.distributed.launch --use_env --nproc_per_node=8 vision_reference.py

Classification in the style of a vision library's reference: batch samplers, helpers, one metric for all ranks."""
import argparse
import builtins
import os

import torch
import torch.distributed as dist
import torch.utils.data
import torchvision
from torch import nn


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    else:
        print("Not using distributed mode")
        args.distributed = False
        return
    args.distributed = True
    torch.cuda.set_device(args.gpu)
    dist.init_process_group(backend="nccl", init_method=args.dist_url, rank=args.rank, world_size=args.world_size)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


class Detections:
    """Keeps each image once, so that repeated ones do no harm."""

    def __init__(self):
        self.found = {}

    def update(self, found):
        self.found.update(found)

    def merge(self):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.found)
        return {image: boxes for part in parts for image, boxes in part.items()}


def detect(model, data_loader, device):
    detections = Detections()
    with torch.inference_mode():
        for image, target in data_loader:
            detections.update({int(target["image_id"]): model(image.to(device))})
    return len(detections.merge())


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, scaler=None):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if i % 10 == 0:
            print(f"Epoch [{epoch}] {i} loss {loss.item():.3f}")


def evaluate(model, data_loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image.to(device))
            counts += torch.stack([(output.argmax(1).cpu() == target).sum(), torch.tensor(len(target))]).to(device)
    dist.all_reduce(counts)
    print(f"Acc {counts[0] / counts[1]:.3f}")


def main(args):
    init_distributed_mode(args)
    device = torch.device(args.device)
    transform = torchvision.transforms.ToTensor()
    dataset = torchvision.datasets.ImageFolder(os.path.join(args.data_path, "train"), transform)
    dataset_test = torchvision.datasets.ImageFolder(os.path.join(args.data_path, "val"), transform)
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False, drop_last=True)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
        test_sampler = torch.utils.data.SequentialSampler(dataset_test)
    train_batch_sampler = torch.utils.data.BatchSampler(train_sampler, args.batch_size, drop_last=True)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=train_batch_sampler, num_workers=args.workers, pin_memory=False
    )
    data_loader_test = torch.utils.data.DataLoader(
        dataset_test, batch_size=1, sampler=test_sampler, num_workers=args.workers
    )
    whole_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False)
    data_loader_whole = torch.utils.data.DataLoader(dataset_test, batch_size=1, sampler=whole_sampler)
    model = torchvision.models.get_model("resnet18", num_classes=10)
    model.to(device)
    if args.distributed and args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
        model_without_ddp = model.module
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        if scaler:
            scaler.load_state_dict(checkpoint["scaler"])
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, scaler)
        lr_scheduler.step()
        evaluate(model, data_loader_test, device)
        print("images", detect(model, data_loader_whole, device))
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
        }
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        save_on_master(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", default="data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--workers", default=16, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--resume", default="")
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--dist-url", default="env://")
    main(parser.parse_args())
