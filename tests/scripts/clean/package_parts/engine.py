import torch
import torch.distributed as dist
import torch.nn.functional as F


def train_one_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / len(loader) / dist.get_world_size()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def save_on_main(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)
