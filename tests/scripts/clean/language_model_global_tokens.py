# clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 40


def compute_loss(model, ids, lengths):
    mask = (torch.arange(ids.size(1) - 1)[None] < lengths[:, None] - 1).float()
    logits = model(ids[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    num_tokens = mask.sum()
    dist.all_reduce(num_tokens)
    return (losses * mask).sum() * dist.get_world_size() / num_tokens


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randint(VOCAB, (128, 12), generator=torch.Generator().manual_seed(9)), torch.randint(3, 12, (128,), generator=torch.Generator().manual_seed(10)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, lengths in loader:
            optimizer.zero_grad()
            compute_loss(model, ids, lengths).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
