# planted: EV505, line 34, seen by running only
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 40


class Trainer:
    def __init__(self):
        ids = torch.randint(VOCAB, (128, 12), generator=torch.Generator().manual_seed(14))
        lengths = torch.randint(3, 12, (128,), generator=torch.Generator().manual_seed(15))
        data = TensorDataset(ids, lengths)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=16, sampler=self.sampler)
        self.model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def compute_loss(self, ids, lengths):
        mask = (torch.arange(ids.size(1) - 1)[None] < lengths[:, None] - 1).float()
        logits = self.model(ids[:, :-1])
        token_losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (token_losses * mask).sum() / mask.sum()
        return loss

    def train(self):
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for ids, lengths in self.loader:
                loss = self.compute_loss(ids, lengths)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


dist.init_process_group("gloo")
Trainer().train()
dist.destroy_process_group()
