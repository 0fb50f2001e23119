# planted: EV101, line 12
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    data = TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
    dataloader = DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(3):
        for x, y in dataloader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        fabric.print(f"epoch {epoch} done")


if __name__ == "__main__":
    main()
