# planted: EV202, line 19
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.model, self.loader, self.optimizer = model, loader, optimizer
        self.rank = int(os.environ.get("RANK", 0))

    def train(self, num_epochs):
        for epoch in range(num_epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in tqdm(self.loader, desc=f"epoch {epoch}"):
                self.optimizer.zero_grad()
                torch.nn.functional.l1_loss(self.model(x), y).backward()
                self.optimizer.step()
            if self.rank == 0:
                torch.save(self.model.module.state_dict(), "model.pt")


def main():
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(200, 3), torch.randn(200, 1))
    loader = DataLoader(dataset, batch_size=20, sampler=DistributedSampler(dataset))
    model = DDP(torch.nn.Linear(3, 1))
    Trainer(model, loader, torch.optim.Adam(model.parameters())).train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
