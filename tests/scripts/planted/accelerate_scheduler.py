# planted: EV509, line 15
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup


def main():
    accelerator = Accelerator()
    epochs = 3
    loader = DataLoader(TensorDataset(torch.randn(320, 5), torch.randint(2, (320,))), batch_size=8, shuffle=True)
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    num_training_steps = epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, num_training_steps=num_training_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
