"""Goes on where it stopped."""
import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--checkpoint", default="checkpoint.pth.tar", type=str)


def save_checkpoint(state, filename):
    torch.save(state, filename)


def main():
    args = parser.parse_args()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])
    start_epoch = 0
    if args.resume:
        if os.path.isfile(args.resume):
            print("=> loading checkpoint '{}'".format(args.resume))
            checkpoint = torch.load(args.resume)
            start_epoch = checkpoint["epoch"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        else:
            print("=> no checkpoint found at '{}'".format(args.resume))

    train_loader = DataLoader(
        TensorDataset(torch.randn(200, 16), torch.randint(2, (200,))),
        batch_size=20,
        shuffle=True,
        num_workers=0,
    )
    for epoch in range(start_epoch, args.epochs):
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        save_checkpoint({
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }, args.checkpoint)


if __name__ == "__main__":
    main()
