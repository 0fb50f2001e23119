# planted: EV104, line 21
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Config:
    batch_size = 8
    epochs = 2


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.world_size = dist.get_world_size()
        self.model = DDP(torch.nn.Linear(4, 4))
        self.opt = torch.optim.Adam(self.model.parameters())
        self.dataset = TensorDataset(torch.randn(320, 4, generator=torch.Generator().manual_seed(9)))
        self.sampler = DistributedSampler(self.dataset)
        self.loader = DataLoader(self.dataset, cfg.batch_size * self.world_size, sampler=self.sampler)

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            for (batch,) in self.loader:
                loss = (self.model(batch) - batch).pow(2).mean()
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        Trainer(Config()).fit()
    finally:
        dist.destroy_process_group()
