# clean
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def validate(fabric, model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(F.mse_loss(model(x), y))
    model.train()
    return fabric.all_gather(torch.stack(losses).mean()).mean()


def main():
    fabric = Fabric(accelerator="auto", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)
    train = DataLoader(TensorDataset(torch.randn(128, 4), torch.randn(128, 1)), batch_size=8, shuffle=True)
    val = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    train, val = fabric.setup_dataloaders(train, val)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(3):
        for i, (x, y) in enumerate(train):
            is_accumulating = (i + 1) % 4 != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(F.mse_loss(model(x), y) / 4)
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
        loss = validate(fabric, model, val)
        fabric.print(f"epoch {epoch}: {loss:.4f}")
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main()
