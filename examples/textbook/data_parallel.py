"""The one-line DataParallel program: one process, the batch split between replicas inside `model(x)`.

    python examples/textbook/data_parallel.py
    python examples/textbook/data_parallel.py --with torch

With torch's class a machine without GPUs runs the whole batch in one piece; with evenstep's it is split between two
replicas on the CPU as it would be between two GPUs. The loss is the same.
"""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

import evenstep

INPUT_SIZE, OUTPUT_SIZE = 5, 2
BATCH_SIZE, DATA_SIZE = 30, 100


class RandomDataset(Dataset):
    def __init__(self, size, length):
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(length, size, generator=generator)
        self.target = self.data @ torch.randn(size, OUTPUT_SIZE, generator=generator)

    def __getitem__(self, index):
        return self.data[index], self.target[index]

    def __len__(self):
        return len(self.data)


class Model(nn.Module):
    def __init__(self, input_size, output_size, sizes):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)
        self.sizes = sizes  # a list that all replicas share: the batch sizes they see

    def forward(self, x):
        self.sizes.append(len(x))
        return self.fc(x)


def main():
    parser = argparse.ArgumentParser(description="DataParallel on a small linear model")
    parser.add_argument("--with", dest="classes", choices=["evenstep", "torch"], default="evenstep")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = []
    model = Model(INPUT_SIZE, OUTPUT_SIZE, sizes)
    if args.classes == "torch":
        model = nn.DataParallel(model)  # evenstep: ignore[EV605]
    else:
        model = evenstep.DataParallel(model, device_ids=["cpu", "cpu"])

    loader = DataLoader(RandomDataset(INPUT_SIZE, DATA_SIZE), batch_size=BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:
            sizes.clear()
            output = model(x)
            if epoch == 0:
                print(f"outside: input {tuple(x.shape)}, output {tuple(output.shape)}; inside, batches of {sizes}")
            loss = nn.functional.mse_loss(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"final loss: {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
