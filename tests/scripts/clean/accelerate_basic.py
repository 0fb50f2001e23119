# clean
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


def training_function():
    accelerator = Accelerator()
    train_set = TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))
    eval_set = TensorDataset(torch.randn(99, 8), torch.randint(2, (99,)))
    train_dataloader = DataLoader(train_set, batch_size=16, shuffle=True)
    eval_dataloader = DataLoader(eval_set, batch_size=16)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    progress = tqdm(range(2 * len(train_dataloader)), disable=not accelerator.is_local_main_process)
    for epoch in range(2):
        model.train()
        for inputs, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(1)
        model.eval()
        correct, total = 0, 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: {100 * correct / total:.2f}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), "model.pt")


if __name__ == "__main__":
    training_function()
