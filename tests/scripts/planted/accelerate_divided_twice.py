# planted: EV502, line 17, seen by running only
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

gradient_accumulation_steps = 4
accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train_dataloader = DataLoader(TensorDataset(torch.ones(160, 3), torch.arange(160.0)[:, None]), batch_size=4, shuffle=True)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in range(2):
    for x, y in train_dataloader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
