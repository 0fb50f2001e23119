# planted: EV205, line 39
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 8


def build():
    generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return DDP(generator), DDP(discriminator)


def main():
    dist.init_process_group("gloo")
    netG, netD = build()
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    data = TensorDataset(torch.randn(256, 2, generator=torch.Generator().manual_seed(23)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = netG(torch.randn(len(real), LATENT))
            lossD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
            optD.zero_grad()
            lossD.backward()
            optD.step()
            lossG = criterion(netD(fake), ones)
            optG.zero_grad()
            lossG.backward()
            optG.step()
        with open("samples.txt", "a") as f:
            f.write(f"{epoch} {fake[:4].tolist()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
