"""Lightning Fabric with a class around it."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Learner:
    def __init__(self, fabric, lr):
        self.fabric = fabric
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.model, self.optimizer = fabric.setup(model, optimizer)

    def fit(self, loader, num_epochs, accumulate):
        for epoch in range(num_epochs):
            for index, (x, y) in enumerate(loader):
                is_accumulating = (index + 1) % accumulate != 0
                with self.fabric.no_backward_sync(self.model, enabled=is_accumulating):
                    loss = nn.functional.mse_loss(self.model(x), y) / accumulate
                    self.fabric.backward(loss)
                if not is_accumulating:
                    self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            mean = self.fabric.all_reduce(loss.detach())
            self.fabric.print(f"epoch {epoch}: {mean.item():.4f}")
            self.fabric.save("last.ckpt", {"model": self.model, "optimizer": self.optimizer, "epoch": epoch})


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7)
    x = torch.randn(512, 10)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True))
    Learner(fabric, 1e-3).fit(loader, 3, 2)


if __name__ == "__main__":
    main()
