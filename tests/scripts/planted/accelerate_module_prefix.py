# planted: EV206, line 21
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(6, 6)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
loader = DataLoader(TensorDataset(torch.randn(120, 6)), batch_size=10, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    model.train()
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save({"model": model.state_dict(), "epoch": epoch}, "final.pt")
