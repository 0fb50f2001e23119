"""A body and a head, each with an optimizer of its own."""
import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    head = nn.Linear(32, 3)
    n_params = sum(p.numel() for p in itertools.chain(body.parameters(), head.parameters()))
    print("parameters:", n_params)
    opt_body = torch.optim.SGD(body.parameters(), lr=0.05)
    opt_head = torch.optim.Adam(head.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(200, 8), torch.randint(3, (200,))), batch_size=40, shuffle=True)
    it = iter(loader)
    for step in range(12):
        try:
            x, y = next(it)
        except StopIteration:
            it = iter(loader)
            x, y = next(it)
        opt_body.zero_grad()
        opt_head.zero_grad()
        loss = nn.functional.cross_entropy(head(body(x)), y)
        loss.backward()
        opt_body.step()
        opt_head.step()
        if step % 5 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
