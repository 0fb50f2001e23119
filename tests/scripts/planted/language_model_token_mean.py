# planted: EV505, line 53, seen by running only
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Sentences(Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(2, 20, (num,), generator=generator).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return torch.arange(self.lengths[i]) % 50


def collate(rows):
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
    targets = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PAD)
    return inputs, targets


class LM(nn.Module):
    def __init__(self, vocab=50, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.embedding(ids))[0])


def main():
    dist.init_process_group("gloo")
    corpus = Sentences(256)
    sampler = DistributedSampler(corpus)
    loader = DataLoader(corpus, batch_size=16, sampler=sampler, collate_fn=collate)
    model = DDP(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
