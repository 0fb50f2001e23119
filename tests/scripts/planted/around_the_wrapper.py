# planted: EV606, line 18, seen by running only
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(20, 4), nn.Linear(4, 20)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def compute_loss(self, x):
        return nn.functional.mse_loss(self(x), x)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(400, 20, generator=torch.Generator().manual_seed(9)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(Autoencoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model.module.compute_loss(x)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
