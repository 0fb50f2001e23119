"""An average of weights beside the model, and a checkpoint with all that a step depends on."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = "checkpoint.pt"


@torch.no_grad()
def update_average(average, net, decay=0.999):
    for mine, new in zip(average.parameters(), net.parameters()):
        mine.lerp_(new, 1 - decay)


def main():
    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(768, 10), torch.randn(768, 1))
    net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 1))
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    first = 0
    if os.path.exists(PATH):
        state = torch.load(PATH, map_location="cpu", weights_only=True)
        net.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    model = DDP(net)
    sampler = DistributedSampler(data, seed=11)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(first, 20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_average(average, net)
        scheduler.step()
        if is_main:
            state = {
                "model": net.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, f"{PATH}.new")
            os.replace(f"{PATH}.new", PATH)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
