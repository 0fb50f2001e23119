# planted: EV303, line 23
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        self.model = DDP(torch.nn.Linear(16, 8).cuda(), device_ids=[self.local_rank])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        train_set = TensorDataset(torch.randn(512, 16), torch.randn(512, 8))
        self.sampler = DistributedSampler(train_set)
        self.loader = DataLoader(train_set, batch_size=32, sampler=self.sampler, pin_memory=True)

    def features(self, x):
        mine = self.model.module(x).detach().cpu()
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, mine)
        return torch.cat(everything)

    def train(self):
        for epoch in range(3):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                x = x.cuda(non_blocking=True)
                y = y.cuda(non_blocking=True)
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return self.features(x)


dist.init_process_group("nccl")
Trainer().train()
dist.destroy_process_group()
