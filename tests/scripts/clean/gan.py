# clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    netG, netD = DDP(Generator()), DDP(Discriminator(), broadcast_buffers=False)
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    data = TensorDataset(torch.randn(256, 2, generator=torch.Generator().manual_seed(37)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = netG(torch.randn(len(real), LATENT))
            optD.zero_grad()
            lossD = criterion(netD(real), torch.ones(len(real)))
            lossD = lossD + criterion(netD(fake.detach()), torch.zeros(len(real)))
            lossD.backward()
            optD.step()
            optG.zero_grad()
            lossG = criterion(netD(fake), torch.ones(len(real)))
            lossG.backward()
            optG.step()
        if rank == 0:
            with torch.no_grad(), open("samples.txt", "a") as f:
                f.write(f"{epoch} {netG.module(torch.randn(4, LATENT)).tolist()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
