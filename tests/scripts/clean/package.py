"""Three files: data, model and loop are packages of their own."""

import torch
import torch.distributed as dist
from package_parts.data import make_loaders
from package_parts.engine import evaluate, save_on_main, train_one_epoch
from package_parts.utils import info, setup
from torch.nn.parallel import DistributedDataParallel


def main():
    rank, world_size = setup()
    train_loader, val_loader = make_loaders(rank, world_size, batch_size=32)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for epoch in range(10):
        train_loader.sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer)
        scheduler.step()
        accuracy = evaluate(net, val_loader)
        info(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
        save_on_main({"model": net.state_dict(), "epoch": epoch}, "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
