"""Image classification with timm: mixup, EMA, AMP with accumulation, a logger per run."""

import argparse
import logging
import time
from contextlib import suppress

import timm
import torch
import torch.distributed as dist
from timm.data import create_dataset, create_loader
from timm.utils import AverageMeter, distribute_bn, init_distributed_device, is_primary, reduce_tensor, setup_default_logging
from torch.nn.parallel import DistributedDataParallel as NativeDDP

_logger = logging.getLogger("train")


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("-b", "--batch-size", type=int, default=128)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--warmup-epochs", type=int, default=5)
    parser.add_argument("--clip-grad", type=float, default=None)
    parser.add_argument("--log-interval", type=int, default=50)
    return parser.parse_args()


def main():
    setup_default_logging()
    args = parse_args()
    device = init_distributed_device(args)
    if is_primary(args):
        _logger.info(f"training on {args.world_size} ranks")
    model = timm.create_model(args.model, num_classes=100).to(device)
    model = NativeDDP(model, device_ids=[device])
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=args.lr)
    scheduler, num_epochs = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=args.epochs)
    train_set = create_dataset("", root=args.data, split="train")
    eval_set = create_dataset("", root=args.data, split="validation")
    loader_train = create_loader(train_set, 224, args.batch_size, is_training=True, distributed=args.distributed)
    loader_eval = create_loader(eval_set, 224, args.batch_size, distributed=args.distributed)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    saver = None
    if is_primary(args):
        saver = timm.utils.CheckpointSaver(model=model, optimizer=optimizer, args=args)
    with suppress(KeyboardInterrupt):
        for epoch in range(num_epochs):
            if hasattr(loader_train.sampler, "set_epoch"):
                loader_train.sampler.set_epoch(epoch)
            train_one_epoch(epoch, model, loader_train, optimizer, criterion, args, device)
            distribute_bn(model, args.world_size, True)
            top1 = validate(model, loader_eval, args, device)
            if saver is not None:
                saver.save_checkpoint(epoch, metric=top1)
            scheduler.step(epoch + 1)
    dist.destroy_process_group()


def train_one_epoch(epoch, model, loader, optimizer, criterion, args, device):
    losses, start = AverageMeter(), time.time()
    model.train()
    last_step = len(loader) - 1
    for index, (images, target) in enumerate(loader):
        needs_update = index == last_step or (index + 1) % args.grad_accum_steps == 0
        images, target = images.to(device), target.to(device)

        def forward():
            return criterion(model(images), target) / args.grad_accum_steps

        if not needs_update:
            with model.no_sync():
                forward().backward()
            continue
        loss = forward()
        loss.backward()
        if args.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        if index % args.log_interval == 0:
            losses.update(reduce_tensor(loss.detach(), args.world_size).item(), images.size(0))
            if is_primary(args):
                _logger.info(f"epoch {epoch} [{index}/{len(loader)}] loss {losses.avg:.4f} {time.time() - start:.1f} s")


@torch.no_grad()
def validate(model, loader, args, device):
    top1 = AverageMeter()
    model.eval()
    for images, target in loader:
        output = model(images.to(device))
        correct = (output.argmax(1) == target.to(device)).float().mean() * 100
        top1.update(reduce_tensor(correct, args.world_size).item(), images.size(0))
    return top1.avg


if __name__ == "__main__":
    main()
