# planted: EV204, line 10
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def save(accelerator, model, path):
    if accelerator.is_local_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), path)


def main():
    accelerator = Accelerator()
    data = TensorDataset(torch.randn(512, 8), torch.randint(0, 2, (512,)))
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        save(accelerator, model, "model.pt")


if __name__ == "__main__":
    main()
