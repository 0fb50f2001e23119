"""A small GPT over the bytes of Python's own standard library, on any number of replicas.

    evenstep run --nproc-per-node 2 examples/language_model.py --steps 300

Each file is cut into windows of `--context` bytes; the last one of a file is short. So the replicas' shares of a
batch hold different numbers of bytes, and the loss, a mean over bytes, is weighted with them: the gradient is that of
the whole batch, whoever got the short windows.
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import evenstep

NUM_BYTES = 256
PADDING = -100  # a target that cross_entropy leaves out


def windows_of(texts, context):
    """Windows of one text per file: inputs [context] and the bytes that follow them [context], int64."""
    tokens = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    return evenstep.TokenDataset(tokens, context, documents=[len(text) for text in texts], padding=PADDING)


def read_texts(max_bytes):
    """Python's own modules, in order of name, up to about `max_bytes`; the end of each is held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts, held_out, total = [], [], 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()[: max_bytes - total]
        total += len(text)
        if len(text) >= 100:
            cut = len(text) - len(text) // 20
            texts.append(text[:cut])
            held_out.append(text[cut:])
    return texts, held_out


# ---------------------------------------------------------------------- the model


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        # [batch, length, width] three times, each to [batch, heads, length, width / heads]
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Pre-norm transformer; the output layer is the embedding of the input (tied)."""

    def __init__(self, width=256, num_layers=6, num_heads=8, context=256):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the residual stream begins smaller, the more of it there is (GPT-2).
                is_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02)

    def forward(self, x):
        position = torch.arange(x.shape[1], device=x.device)
        x = self.embedding(x) + self.position(position)
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt, num_bytes, temperature=0.8):
        """Continue a text, byte by byte."""
        device = self.embedding.weight.device
        text = torch.tensor(list(prompt), device=device).unsqueeze(0)
        for _ in range(num_bytes):
            logits = self(text[:, -self.context :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist())


def loss_of(model, x, y):
    """The mean over the bytes that count, in nats, and how many they are."""
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDING), (y != PADDING).sum()


# ---------------------------------------------------------------------- training


def learning_rate(step, num_steps):
    """As a share of the highest: a linear rise over the first tenth, then half a cosine."""
    warmup = max(1, num_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def batches(loader):
    """Epoch after epoch."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(model, loader, world):
    """Bits per byte of held-out text, each byte counted once."""
    total = count = torch.zeros((), dtype=torch.float64, device=world.device)
    for x, y in loader:
        loss, num_bytes = loss_of(model, x, y)
        total = total + torch.where(num_bytes > 0, loss, 0).double() * num_bytes
        count = count + num_bytes
    return world.mean(total / count.clamp_min(1), weight=count).item() / math.log(2)


def train(world, args):
    texts, held_out = read_texts(args.max_bytes)
    train_set = windows_of(texts, args.context)
    test_set = windows_of(held_out, args.context)
    test_set = Subset(test_set, range(0, len(test_set), max(1, len(test_set) // 32)))
    loader = evenstep.DataLoader(train_set, global_batch_size=args.batch, shuffle=True)
    test_loader = evenstep.DataLoader(test_set, global_batch_size=args.batch)

    model = evenstep.DistributedDataParallel(
        GPT(width=args.width, num_layers=args.layers, num_heads=args.width // 32, context=args.context)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    num_parameters = sum(p.numel() for p in model.parameters())
    world.print(
        f"{num_parameters / 1e6:.1f} million parameters, {train_set.num_tokens / 1e6:.1f} MB of text in "
        f"{len(train_set):,} windows, {args.batch} windows a step"
    )

    start, tokens, tokens_before, time_before = time.perf_counter(), 0, 0, time.perf_counter()
    steps = zip(range(1, args.steps + 1), batches(loader), strict=False)
    for step, (x, y) in world.progress(steps, description="training", total=args.steps, interval_s=60):
        loss, num_bytes = loss_of(model, x, y)
        model.backward(loss, weight=num_bytes)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tokens += args.batch * args.context
        if step % args.log_every == 0 or step == args.steps:
            bits = world.mean(loss, weight=num_bytes).item() / math.log(2)
            now = time.perf_counter()
            speed = (tokens - tokens_before) / (now - time_before)
            tokens_before, time_before = tokens, now
            world.print(f"step {step}: {bits:.3f} bits per byte, {speed:,.0f} tokens/s")
    elapsed = time.perf_counter() - start

    held_out_bits = evaluate(model, test_loader, world)
    world.print(f"held out: {held_out_bits:.3f} bits per byte; {tokens / elapsed:,.0f} tokens/s over all")
    if world.is_main and args.sample > 0:
        torch.manual_seed(0)
        text = model.module.generate(b"def ", args.sample).decode(errors="replace")
        print(f"----- a sample after {args.steps} steps -----\n{text}\n-----", flush=True)


def main():
    parser = argparse.ArgumentParser(description="train a small GPT on Python's own standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="windows of one step on all replicas together")
    parser.add_argument("--context", type=int, default=256, help="bytes in a window")
    parser.add_argument("--width", type=int, default=256, help="of the model; a multiple of 32, the width of a head")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="how much text to read")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate at the end")
    args = parser.parse_args()
    if args.width % 32:
        parser.error(f"--width {args.width} is no multiple of 32")
    with evenstep.init(seed=0) as world:
        train(world, args)


if __name__ == "__main__":
    main()
