# planted: EV204, line 20
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(devices=2, strategy="ddp", accelerator="cpu")
    fabric.launch()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=10, shuffle=True))
    for epoch in range(2):
        for (x,) in loader:
            loss = model(x).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"weights": [p.detach() for p in model.parameters()]}, "weights.pt")


if __name__ == "__main__":
    main()
