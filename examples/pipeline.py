"""A small transformer in stages, on torch's pipelining (1F1B) x data parallelism: our loader, weights and checkpoints.

    evenstep run --nproc-per-node 4 examples/pipeline.py --stages 2
    python examples/pipeline.py

Both print the same losses. `--stages 2` on 4 ranks: two pipelines of two stages each. Both stages of a pipeline get the
same samples, and each pipeline has samples of its own. Checkpoints can be resumed with another number of stages.

Sequences have different lengths, so the shares of a batch hold different numbers of tokens. Stages exchange tensors of
one fixed shape; a short share is filled with rows that don't count. So every stage adds up the gradients of sums over
tokens, and divides once by the number of all tokens: the exact mean, whoever got the short sequences.
"""

import argparse
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import Dataset

import evenstep

VOCABULARY, LENGTH, WIDTH, NUM_LAYERS = 32, 16, 64, 4
PADDING = -100  # a target that cross_entropy leaves out
NUM_MICROBATCHES = 4


class Sequences(Dataset):
    """Arithmetic modulo the vocabulary: start and difference are drawn, the rest follows. Lengths differ."""

    def __len__(self):
        return 500

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        start, difference, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in LIMITS)
        tokens = (start + difference * torch.arange(LENGTH + 1)) % VOCABULARY
        target = torch.where(torch.arange(LENGTH) < length, tokens[1:], PADDING)
        return tokens[:-1], target


LIMITS = ((0, VOCABULARY), (1, 5), (4, LENGTH + 1))  # of start, difference and length


# ---------------------------------------------------------------------- the model, in stages


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Stage(nn.Module):
    """Some consecutive layers of the model, under the names that they have in the whole model."""

    def __init__(self, layers, index, num_stages):
        super().__init__()
        bounds = [len(layers) * number // num_stages for number in range(num_stages + 1)]
        self.layers = nn.ModuleDict({str(n): layers[n] for n in range(bounds[index], bounds[index + 1])})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, tokens):
        return self.token(tokens) + self.position


def sum_over_tokens(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")


# ---------------------------------------------------------------------- checkpoints

Shard = namedtuple("Shard", "path shape offset_numel values")


class InStages:
    """The state of model and optimizer, for a `Checkpointer`: every stage has other tensors of it.

    `state_shards` returns what this rank writes; the first pipeline writes everything. A load gives the whole state to
    every rank, which takes what its stage has.
    """

    def __init__(self, stage, optimizer, world):
        self.stage, self.optimizer, self.writes = stage, optimizer, world.data_rank == 0

    def state_dict(self):
        names = [name for name, _ in self.stage.named_parameters()]
        state = self.optimizer.state_dict()["state"]
        return {"model": self.stage.state_dict(), "optimizer": {names[number]: each for number, each in state.items()}}

    def state_shards(self):
        state = self.state_dict()
        found = [(("model", name), value) for name, value in state["model"].items()]
        found += [
            (("optimizer", n, key), value) for n, each in state["optimizer"].items() for key, value in each.items()
        ]
        shards = [Shard(path, tuple(value.shape), 0, value.detach().reshape(-1)) for path, value in found]
        return {"model": {}, "optimizer": {}}, shards if self.writes else []

    def load_state_dict(self, state):
        names = [name for name, _ in self.stage.named_parameters()]
        self.stage.load_state_dict({name: state["model"][name] for name in self.stage.state_dict()})
        kept = {number: state["optimizer"][name] for number, name in enumerate(names)}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": kept})


# ---------------------------------------------------------------------- training


def filled(x, num_rows, value):
    """A share of a batch with as many rows as the others have, or will have."""
    return torch.cat([x, x.new_full((num_rows - len(x), *x.shape[1:]), value)])


@torch.no_grad()
def average_gradients(stage, num_tokens, world):
    """Divide the sums of all pipelines' gradients by the number of all tokens, which is returned."""
    flat = torch.cat([p.grad.flatten() for p in stage.parameters()] + [torch.tensor([float(num_tokens)])])
    if world.data_size > 1:
        dist.all_reduce(flat, group=world.mesh.get_group("replicate"))
    *grads, total = flat.split([p.numel() for p in stage.parameters()] + [1])
    for parameter, grad in zip(stage.parameters(), grads, strict=True):
        parameter.grad = grad.view_as(parameter) / total
    return total.item()


def train(world, args):
    loader = evenstep.DataLoader(Sequences(), global_batch_size=args.batch, shuffle=True)
    index = world.mesh.get_local_rank("pipeline")
    torch.manual_seed(0)  # every rank makes the whole model, and keeps a part of it
    whole = [
        Embedding(),
        *(Block() for _ in range(NUM_LAYERS)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
    ]
    module = Stage(whole, index, args.stages)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    stage = PipelineStage(module, index, args.stages, world.device, group=world.mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=sum_over_tokens, scale_grads=False)
    checkpoint = evenstep.Checkpointer(args.directory, training=InStages(module, optimizer, world), loader=loader)
    checkpoint.resume()

    most = -(-args.batch // world.data_size)  # rows of the largest share
    num_rows = -(-most // NUM_MICROBATCHES) * NUM_MICROBATCHES
    for _ in loader.epochs(1000):
        for x, y in loader:
            if checkpoint.num_steps >= args.steps:
                return
            tokens, target = filled(x, num_rows, 0), filled(y, num_rows, PADDING)
            losses = []
            schedule.step(*([tokens] if index == 0 else []), target=target, losses=losses, return_outputs=False)
            num_tokens = average_gradients(module, int((y != PADDING).sum()), world)
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            # Only a last stage has losses: the other ranks count with the weight 0.
            mine = sum(loss.item() for loss in losses)
            total = world.mean(mine, weight=float(bool(losses))) * world.data_size
            if checkpoint.num_steps % 5 == 0 or checkpoint.num_steps == args.steps:
                world.print(f"step {checkpoint.num_steps}: loss {total / num_tokens:.5f} of {num_tokens:.0f} tokens")


def main():
    parser = argparse.ArgumentParser(description="train a small transformer in stages")
    parser.add_argument("--stages", type=int, default=1, help="ranks that a model is divided over; 1 to 6")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=30, help="sequences of one step, of all pipelines together")
    parser.add_argument("--directory", default="runs/pipeline", help="of checkpoints")
    args = parser.parse_args()
    if not 1 <= args.stages <= NUM_LAYERS + 2:
        parser.error(f"--stages {args.stages}: there are {NUM_LAYERS + 2} layers")
    torch.set_num_threads(1)  # its tensors are small
    with evenstep.init(seed=0, device="cpu", mesh={"pipeline": args.stages, "replicate": -1}) as world:
        train(world, args)


if __name__ == "__main__":
    main()
