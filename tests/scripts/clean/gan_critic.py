"""A GAN with a critic that takes several steps for each of the generator's."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_CRITIC_STEPS = 5


def build(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    real_set = TensorDataset(torch.randn(1024, 2) @ torch.tensor([[2.0, 0.5], [0.5, 1.0]]))
    torch.manual_seed(1 + rank)
    sampler = DistributedSampler(real_set, drop_last=True)
    loader = DataLoader(real_set, batch_size=64, sampler=sampler, drop_last=True)
    generator = DDP(build([8, 64, 64, 2]))
    critic = DDP(build([2, 64, 64, 1]))
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    step = 0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            noise = torch.randn(len(real), 8)
            with torch.no_grad():
                fake = generator(noise)
            c_loss = critic(fake).mean() - critic(real).mean()
            c_optimizer.zero_grad()
            c_loss.backward()
            c_optimizer.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.01, 0.01)
            step += 1
            if step % NUM_CRITIC_STEPS == 0:
                g_loss = -critic(generator(torch.randn(len(real), 8))).mean()
                g_optimizer.zero_grad()
                g_loss.backward()
                g_optimizer.step()
        if rank == 0:
            print(f"{epoch}: critic {c_loss.item():.4f}")
            torch.save(generator.module.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
