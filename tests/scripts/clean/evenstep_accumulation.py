# clean
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import evenstep

BATCH_PER_RANK = 8

with evenstep.init(seed=1) as world:
    data = TensorDataset(torch.randn(512, 6), torch.randn(512, 1))
    loader = evenstep.DataLoader(data, global_batch_size=BATCH_PER_RANK * world.world_size, shuffle=True)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(6, 1), device_ids=None)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for epoch in loader.epochs(2):
        for i, (x, y) in enumerate(loader):
            with model.accumulate(i % 4 != 3):
                model.backward(F.mse_loss(model(x), y), weight=len(x))
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    if world.is_main:
        torch.save(model.module.state_dict(), "model.pt")
