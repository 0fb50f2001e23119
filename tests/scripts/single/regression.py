from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 0.05
    batch_size: int = 44
    epochs: int = 2
    patience: int = 3


def prepare(cfg):
    X, y = load_diabetes(return_X_y=True)
    X = StandardScaler().fit_transform(X).astype(np.float32)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    split = 352
    train_ds = TensorDataset(torch.from_numpy(X[:split]), torch.from_numpy(y[:split]))
    val_ds = TensorDataset(torch.from_numpy(X[split:]), torch.from_numpy(y[split:]))
    return {
        "train": DataLoader(train_ds, batch_size=cfg.batch_size, shuffle=True),
        "val": DataLoader(val_ds, batch_size=cfg.batch_size),
    }


def run(cfg: Config) -> float:
    torch.manual_seed(0)
    loaders = prepare(cfg)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    best, bad_epochs = float("inf"), 0
    for epoch in range(cfg.epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss = 0.0
            for xb, yb in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    error = model(xb).squeeze(1) - yb
                    loss = torch.mean(error ** 2)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * xb.size(0)
            epoch_loss = running_loss / len(loaders[phase].dataset)
            print(f"{phase} mse {epoch_loss:.4f}")
        scheduler.step(epoch_loss)
        if epoch_loss < best:
            best, bad_epochs = epoch_loss, 0
        else:
            bad_epochs += 1
            if bad_epochs >= cfg.patience:
                print("early stopping")
                break
    return best


if __name__ == "__main__":
    print("best:", run(Config()))
