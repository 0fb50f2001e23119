# planted: EV305, line 22
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


def main():
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.SiLU(), torch.nn.Linear(50, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataloader = DataLoader(TensorDataset(torch.randn(1000, 10), torch.randn(1000, 1)), batch_size=20, shuffle=True)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    bar = tqdm(range(3 * len(dataloader)), disable=not accelerator.is_local_main_process)
    for epoch in range(3):
        for x, y in dataloader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(1)
            bar.set_postfix(loss=loss.detach().item())


if __name__ == "__main__":
    main()
