"""Mixed precision, with a warm-up and a cosine."""
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def build_model(width):
    model = nn.Sequential(
        nn.Linear(24, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 4))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def main():
    torch.manual_seed(7)
    device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')
    data = TensorDataset(torch.randn(384, 24), torch.randint(0, 4, (384,)))
    loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=0, pin_memory=torch.cuda.is_available())

    model = build_model(64)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    num_steps = 2 * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == 'cuda')
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(2):
        model.train()
        for step, (x, y) in enumerate(loader):
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                logits = model(x)
                loss = criterion(logits, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if step % 4 == 0:
                print(f'epoch {epoch} step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.2e}')


if __name__ == '__main__':
    main()
