"""The same answer: any number of replicas computes what one process computes, in float64 to 1e-12.

The reference here is plain torch on the whole global batch; it knows nothing of evenstep.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep

NUM_SAMPLES, GLOBAL_BATCH, STEPS = 103, 16, 50  # 103 is divisible by nothing that is used here
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def make_model(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, 12), nn.Flatten(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 5 * 7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.double()


def make_data(seed):
    """Sequences of 5 tokens of which a random number counts, in some samples none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 11, (NUM_SAMPLES, 5), generator=generator)
    y = torch.randint(0, 7, (NUM_SAMPLES, 5), generator=generator)
    lengths = torch.randint(0, 6, (NUM_SAMPLES,), generator=generator)
    y[torch.arange(5)[None] >= lengths[:, None]] = -100
    return torch.utils.data.TensorDataset(x, y)


def token_loss(logits, y):
    """The mean over the tokens that count; NaN where none does."""
    return F.cross_entropy(logits.reshape(-1, 7), y.reshape(-1), ignore_index=-100)


def train_with_evenstep(optimizer_name, accumulation, seed):
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(make_model(seed + world.rank), bucket_cap_mb=0.004, world=world)
    with torch.no_grad():  # the wrapped replica is rank 0's
        model.module.load_state_dict(make_model(seed).state_dict())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    loader = evenstep.DataLoader(make_data(seed), global_batch_size=GLOBAL_BATCH, shuffle=True, seed=seed, world=world)
    step = 0
    for _ in loader.epochs(STEPS):
        for x, y in loader:
            for mx, my in model.microbatches((x, y), accumulation):
                # Sevenths, which no binary number holds: a weight must not be rounded to float32 on its way.
                model.backward(token_loss(model(mx).view(-1, 5, 7), my), weight=(my != -100).sum().double() / 7)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                return [parameter.detach() for parameter in model.parameters()]
    raise AssertionError("unreachable")


def train_alone(optimizer_name, seed):
    """Plain torch, one process, whole global batches in the same order."""
    model = make_model(seed)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    loader = evenstep.DataLoader(
        make_data(seed), global_batch_size=GLOBAL_BATCH, shuffle=True, seed=seed, world=evenstep.World.alone()
    )
    step = 0
    while True:
        for x, y in loader:
            token_loss(model(x).view(-1, 5, 7), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.extended(beyond=8)
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulation", [4, 1])
def test_fifty_steps_equal_one_process(ranks, fresh_seed, nproc, accumulation, optimizer_name):
    expected = train_alone(optimizer_name, fresh_seed)
    replicas = ranks.run(train_with_evenstep, nproc, optimizer_name, accumulation, fresh_seed)
    for parameters in replicas:
        for parameter, reference in zip(parameters, expected, strict=True):
            assert torch.isfinite(reference).all()
            torch.testing.assert_close(parameter, reference, rtol=0, atol=1e-12)
    for parameters in replicas[1:]:  # and between replicas not a bit differs
        assert all(torch.equal(a, b) for a, b in zip(parameters, replicas[0], strict=True))
