# clean
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


def setup_for_distributed(is_master):
    import builtins

    builtin_print = builtins.print

    def print_on_master(*values, force=False, **options):
        if is_master or force:
            builtin_print(*values, **options)

    builtins.print = print_on_master


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    setup_for_distributed(rank == 0)
    torch.cuda.set_device(local_rank)
    if rank == 0:
        datasets.MNIST("data", train=True, download=True)
    dist.barrier()
    train_set = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, num_workers=2, pin_memory=True)
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
