"""Batches cut out of two tensors, with no loader."""
import torch
import torch.nn as nn

torch.manual_seed(0)
X = torch.randn(200, 8)
Y = torch.randn(200, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for epoch in range(2):
    permutation = torch.randperm(200)
    for start in range(0, 200, 20):
        index = permutation[start:start + 20]
        loss = nn.functional.mse_loss(model(X[index]), Y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
