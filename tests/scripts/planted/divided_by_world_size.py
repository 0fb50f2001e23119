# planted: EV502, line 22, seen by running only
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    dataset = TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(9)), torch.randn(96, 1, generator=torch.Generator().manual_seed(10)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss = loss / world_size
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
