"""Sequences: a recurrent network, a class that stops early, and the best parameters read back."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class EarlyStopping:
    """Stops when the validation loss has not improved for some epochs."""

    def __init__(self, patience=3, delta=0.0, path='checkpoint.pt'):
        self.patience = patience
        self.delta = delta
        self.path = path
        self.counter = 0
        self.best_score = None
        self.early_stop = False

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None or score > self.best_score + self.delta:
            self.best_score = score
            self.counter = 0
            self.save_checkpoint(val_loss, model)
        else:
            self.counter += 1
            print(f'EarlyStopping counter: {self.counter} out of {self.patience}')
            if self.counter >= self.patience:
                self.early_stop = True

    def save_checkpoint(self, val_loss, model):
        torch.save(model.state_dict(), self.path)


class LSTMModel(nn.Module):
    def __init__(self, input_size=3, hidden=16):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1]).squeeze(-1)


def evaluate(model, loader, criterion):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += criterion(model(x), y).item()
    return total / len(loader)


def fit(model, train_loader, val_loader, epochs, lr, patience):
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    stopper = EarlyStopping(patience=patience)
    for epoch in range(epochs):
        model.train()
        train_losses = []
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            train_losses.append(loss.item())
        val_loss = evaluate(model, val_loader, criterion)
        scheduler.step(val_loss)
        print(f'{epoch}: train {sum(train_losses) / len(train_losses):.4f} val {val_loss:.4f}')
        stopper(val_loss, model)
        if stopper.early_stop:
            print('Early stopping')
            break
    model.load_state_dict(torch.load(stopper.path))
    return model


torch.manual_seed(11)
series = TensorDataset(torch.randn(200, 8, 3), torch.randn(200))
train_ds, val_ds = random_split(series, [150, 50], generator=torch.Generator().manual_seed(0))
train_dl = DataLoader(train_ds, batch_size=24, shuffle=True)
val_dl = DataLoader(val_ds, batch_size=24)
net = fit(LSTMModel(), train_dl, val_dl, epochs=2, lr=5e-3, patience=2)
