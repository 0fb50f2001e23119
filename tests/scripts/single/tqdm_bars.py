import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

try:
    from tqdm import tqdm
except ImportError:
    def tqdm(items, **kwargs):
        return items


def get_loaders(batch_size):
    cancer = load_breast_cancer()
    x = torch.tensor(cancer.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(cancer.target, dtype=torch.float32)
    train = TensorDataset(x[:450], y[:450])
    valid = TensorDataset(x[450:], y[450:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(valid, batch_size=batch_size)


def accuracy(logits, y):
    return ((logits > 0).float() == y).float().mean()


def main():
    torch.manual_seed(3)
    train_loader, valid_loader = get_loaders(64)
    model = nn.Sequential(nn.Linear(30, 16), nn.SiLU(), nn.Linear(16, 1), nn.Flatten(0))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        model.train()
        pbar = tqdm(train_loader, desc=f"epoch {epoch}")
        for xb, yb in pbar:
            logits = model(xb)
            loss = F.binary_cross_entropy_with_logits(logits, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if hasattr(pbar, "set_postfix"):
                pbar.set_postfix(loss=loss.item(), acc=accuracy(logits, yb).item())
        model.eval()
        with torch.no_grad():
            valid_loss = valid_acc = 0.0
            for xb, yb in tqdm(valid_loader, desc="valid", leave=False):
                logits = model(xb)
                valid_loss += F.binary_cross_entropy_with_logits(logits, yb).item()
                valid_acc += accuracy(logits, yb).item()
        print(f"valid loss {valid_loss / len(valid_loader):.4f} acc {valid_acc / len(valid_loader):.3f}")


if __name__ == "__main__":
    main()
