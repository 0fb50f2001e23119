# planted: EV104, line 13
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import evenstep

PER_DEVICE_BATCH = 16

with evenstep.init(seed=0) as world:
    data = TensorDataset(torch.randn(512, 6), torch.randn(512, 1))
    per_device_batch_size = PER_DEVICE_BATCH
    loader = evenstep.DataLoader(data, global_batch_size=per_device_batch_size, shuffle=True)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in loader.epochs(2):
        for x, y in world.progress(loader):
            model.backward(F.mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
