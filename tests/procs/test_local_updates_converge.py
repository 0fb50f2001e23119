"""Ranks that step alone and average now and then learn the examples as well as ranks that average every gradient."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import evenstep

from .test_examples import EXAMPLES, load_module


def loaders(train_set, test_set, batch_size: int, world: evenstep.World):
    return (
        evenstep.DataLoader(train_set, global_batch_size=batch_size, shuffle=True, seed=0, world=world),
        evenstep.DataLoader(test_set, global_batch_size=120, world=world),
    )


def digits(every: int | None, num_epochs: int) -> float:
    """Accuracy on held-out digits; `every` None: gradients are averaged in every step."""
    world = evenstep.init(quiet=True)
    example: ModuleType = load_module(EXAMPLES / "digits.py")
    loader, test_loader = loaders(*example.load_data(), 128, world)
    model = evenstep.DistributedDataParallel(example.build_model(), world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = None if every is None else evenstep.LocalUpdates(model, optimizer, every=every, warmup_steps=10)
    for _ in loader.epochs(num_epochs):
        for x, y in loader:
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step() if local is None else local.step()
            optimizer.zero_grad()
    if local is not None:
        local.close()
    return example.evaluate(model, test_loader, world)


def language_model(every: int | None, num_steps: int) -> tuple[float, float]:
    """(held-out bits per byte before training, and afterwards)."""
    world = evenstep.init(quiet=True)
    example: ModuleType = load_module(EXAMPLES / "language_model.py")
    texts, held_out = example.read_texts(300_000)
    loader, test_loader = loaders(example.windows_of(texts, 64), example.windows_of(held_out, 64), 32, world)
    torch.manual_seed(0)
    module = example.GPT(width=64, num_layers=2, num_heads=2, context=64)
    model = evenstep.DistributedDataParallel(module, world=world)
    before = example.evaluate(model, test_loader, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: example.learning_rate(step, num_steps))
    local = None if every is None else evenstep.LocalUpdates(model, optimizer, every=every, warmup_steps=10)
    for _, (x, y) in zip(range(num_steps), example.batches(loader), strict=False):
        loss, num_bytes = example.loss_of(model, x, y)
        model.backward(loss, weight=num_bytes)
        optimizer.step() if local is None else local.step()
        optimizer.zero_grad()
        schedule.step()
    if local is not None:
        local.close()
    return before, example.evaluate(model, test_loader, world)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn has the digits")
def test_digits_are_recognised_as_well(ranks):
    """Held-out accuracy with an average every 4 and every 8 steps, beside gradients averaged in each."""
    reference = ranks.run(digits, 2, None, 8, timeout_s=170)[0]
    assert reference > 0.96
    for every in (4, 8):
        accuracies = ranks.run(digits, 2, every, 8, timeout_s=170)
        assert accuracies[0] == accuracies[1], "replicas are equal at the end"
        assert accuracies[0] > reference - 0.015, f"every {every}: {accuracies[0]:.4f}, and {reference:.4f}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_text_is_predicted_as_well(ranks):
    """Held-out bits per byte of the language model; random guesses are 8."""
    before, reference = ranks.run(language_model, 2, None, 150, timeout_s=280)[0]
    assert before > 7.5
    assert reference < 4.0
    told = ranks.run(language_model, 2, 4, 150, timeout_s=280)
    assert told[0] == told[1]
    assert told[0][1] < 1.05 * reference, f"{told[0][1]:.3f}, and {reference:.3f} with every gradient averaged"
