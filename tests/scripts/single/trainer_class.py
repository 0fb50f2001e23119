"""A trainer that keeps everything."""
import os
import time

import torch
import torch.nn as nn
from sklearn.datasets import load_wine
from torch.utils.data import DataLoader, Dataset


class WineDataset(Dataset):
    def __init__(self):
        wine = load_wine()
        data = torch.tensor(wine.data, dtype=torch.float32)
        self.data = (data - data.mean(0)) / data.std(0)
        self.target = torch.tensor(wine.target)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"features": self.data[index], "label": self.target[index]}


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr=1e-2, out_dir="out"):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.best = float("inf")
        self.out_dir = out_dir
        if not os.path.exists(out_dir):
            os.makedirs(out_dir)

    def train_epoch(self, epoch):
        self.model.train()
        total_loss = 0.0
        num_samples = 0
        for batch in self.train_loader:
            features = batch["features"].to(self.device)
            label = batch["label"].to(self.device)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), label)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
            self.optimizer.step()
            total_loss += loss.item() * features.size(0)
            num_samples += features.size(0)
        return total_loss / num_samples

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = []
        for batch in self.val_loader:
            features = batch["features"].to(self.device)
            label = batch["label"].to(self.device)
            loss = self.criterion(self.model(features), label)
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def save(self, name):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
                   os.path.join(self.out_dir, name))

    def fit(self, epochs):
        for epoch in range(epochs):
            start = time.time()
            train_loss = self.train_epoch(epoch)
            val_loss = self.evaluate()
            print(f"[{epoch}] train {train_loss:.4f} val {val_loss:.4f} ({time.time() - start:.1f}s)")
            if val_loss < self.best:
                self.best = val_loss
                self.save("best.pt")


def main():
    torch.manual_seed(0)
    dataset = WineDataset()
    train_set, val_set = torch.utils.data.random_split(dataset, [140, 38])
    train_loader = DataLoader(train_set, batch_size=20, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=20, shuffle=False)
    model = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 3))
    trainer = Trainer(model, train_loader, val_loader)
    trainer.fit(2)


if __name__ == "__main__":
    main()
