"""A penalty by a method of the module, beside a forward pass of the wrapper; and a sample that nothing is trained on."""

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

    def penalty(self):
        return self.encoder.weight.square().mean()


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
            loss = nn.functional.mse_loss(model(x), x) + 1e-4 * model.module.penalty()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            shown = model.module.decoder(torch.randn(1, 4))
        model.module.last = shown
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
