# planted: EV201, line 20
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(model, loader, sampler, criterion, optimizer, num_epochs):
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch [{epoch + 1}/{num_epochs}], loss: {running_loss / len(loader):.4f}")


def main():
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(128, 10), torch.randint(0, 2, (128,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Linear(10, 2))
    train(model, loader, sampler, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), num_epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
