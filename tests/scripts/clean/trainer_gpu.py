# clean
import os

import torch
import torch.distributed as dist
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, local_rank):
        self.device = torch.device("cuda", local_rank)
        self.model = DDP(torch.nn.Linear(100, 10).to(self.device), device_ids=[local_rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = GradScaler("cuda")
        data = TensorDataset(torch.randn(10_000, 100), torch.randint(10, (10_000,)))
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=100, sampler=self.sampler, num_workers=2, pin_memory=True)

    def training_step(self, x, y):
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        with autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros((), device=self.device)
            for step, (x, y) in enumerate(self.loader):
                total += self.training_step(x, y)
                if step % 50 == 0 and dist.get_rank() == 0:
                    print(epoch, step, total.item() / (step + 1))


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    Trainer(local_rank).train(2)
    dist.destroy_process_group()
