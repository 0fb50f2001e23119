"""Characters of python's own library; short lines are padded, and padding doesn't count."""
import random
import textwrap

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PAD = 0
MAX_LEN = 48


class Lines(Dataset):
    def __init__(self, n=192):
        text = open(textwrap.__file__).read()
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 8]
        random.Random(0).shuffle(lines)
        self.lines = lines[:n]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return torch.tensor([min(ord(c), 127) for c in self.lines[i][:MAX_LEN]])


def collate(batch):
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)
    return ids[:, :-1], ids[:, 1:]


class CharLM(nn.Module):
    def __init__(self, vocab=128, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.out(h)

    @torch.no_grad()
    def sample(self, n=20):
        ids = torch.tensor([[ord("d")]])
        for _ in range(n):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return "".join(chr(i) for i in ids[0].tolist())


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        for step, (src, tgt) in enumerate(loader):
            logits = model(src)
            loss = F.cross_entropy(logits.reshape(-1, 128), tgt.reshape(-1), ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if step % 4 == 0:
                print(f"{epoch}:{step} loss {loss.item():.3f}")
        print(repr(model.sample()))


if __name__ == "__main__":
    torch.manual_seed(1234)
    net = CharLM()
    train(net, DataLoader(Lines(), batch_size=24, shuffle=True, collate_fn=collate),
          torch.optim.AdamW(net.parameters(), lr=5e-3), epochs=1)
