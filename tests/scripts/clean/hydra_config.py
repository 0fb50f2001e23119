"""Configuration by hydra: everything is instantiated from a file."""

import os

import hydra
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def build_loader(cfg, dataset, *, shuffle):
    sampler = DistributedSampler(dataset, shuffle=shuffle, seed=cfg.seed, drop_last=True)
    return DataLoader(dataset, sampler=sampler, **cfg.loader), sampler


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig):
    rank, world_size = setup()
    torch.manual_seed(cfg.seed)
    if rank == 0:
        print(OmegaConf.to_yaml(cfg))
    dataset = instantiate(cfg.dataset)
    loader, sampler = build_loader(cfg, dataset, shuffle=True)
    model = DistributedDataParallel(instantiate(cfg.model).cuda())
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    scheduler = instantiate(cfg.scheduler, optimizer=optimizer)
    loss_fn = instantiate(cfg.loss)
    for epoch in range(cfg.trainer.max_epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device="cuda")
        for batch in loader:
            x, y = batch["image"].cuda(non_blocking=True), batch["label"].cuda(non_blocking=True)
            loss = loss_fn(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            running += loss.detach()
        scheduler.step()
        dist.reduce(running, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: {running.item() / len(loader) / world_size:.4f}")
            path = os.path.join(cfg.output_dir, f"epoch{epoch}.pt")
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
