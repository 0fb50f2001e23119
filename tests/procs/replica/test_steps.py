"""Steps on gradients that weren't averaged, and ranks that are out of step: a warning each; none for right programs."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evenstep


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Setting:
    """A model that has made three usual steps, so that its buckets are watched and counts are compared."""

    def __init__(self, seed: int, **arguments) -> None:
        self.world = evenstep.init(quiet=False)
        torch.manual_seed(seed)
        self.model = evenstep.DistributedDataParallel(net(), **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for _ in range(3):
            self.usual_step()

    def rows(self, number: int = 3) -> torch.Tensor:
        return torch.randn(number, 4)

    def usual_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.rows()).mean().backward()
        self.optimizer.step()


def told(program, seed: int, kind: str) -> list[str]:
    """The warnings that a program gets on this rank, of steps and of slips."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(seed, kind)
    words = ("not averaged over ranks", "ranks are out of step")
    return [str(each.message) for each in caught if any(word in str(each.message) for word in words)]


# ---------------------------------------------------------------------- steps on gradients that weren't averaged


def steps_past_the_average(seed, kind):
    s = Setting(seed)
    for _ in range(3):
        s.optimizer.zero_grad(set_to_none=kind != "zeros")
        if kind in ("past the wrapper", "zeros"):
            s.model.module(s.rows()).mean().backward()
        elif kind == "clipped":
            s.model.module(s.rows()).mean().backward()
            nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
        elif kind == "no_sync":
            with s.model.no_sync():
                s.model(s.rows()).mean().backward()
        elif kind == "added to an average":
            s.model(s.rows()).mean().backward()
            s.model.module(s.rows()).mean().backward()
        s.optimizer.step()


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("kind", ["past the wrapper", "zeros", "clipped", "no_sync", "added to an average"])
def test_a_step_on_gradients_that_were_not_averaged_is_named_once(ranks, fresh_seed, nproc, kind):
    first, *others = ranks.run(told, nproc, steps_past_the_average, fresh_seed, kind)
    (text,) = first
    assert text.startswith("rank 0: SGD.step at ")
    assert "test_steps.py:" in text
    assert ("no_sync" if kind == "no_sync" else "bypassed the wrapper") in text
    assert all(len(each) <= 1 for each in others)  # where warnings are shown


def averaged_some_other_way(seed, kind):
    s = Setting(seed)
    model, optimizer, size = s.model, s.optimizer, s.world.world_size
    local = evenstep.LocalSGD(model, optimizer, every=3) if kind.startswith("LocalSGD") else None
    zero = None
    if kind == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    sharded = None
    if kind == "ShardedOptimizer":
        sharded = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.01)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for _ in range(4):
        (sharded or optimizer).zero_grad()
        if kind == "by hand":
            model.module(s.rows()).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.data)
                parameter.grad.data /= size
        elif kind == "by hand, under no_sync":
            with model.no_sync():
                model(s.rows()).mean().backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            dist.all_reduce(flat)
        elif kind == "a penalty first":
            model.module(s.rows()).square().mean().backward()
            model(s.rows()).mean().backward()
        elif kind == "a probe":
            model.module(s.rows()).mean().backward()
            optimizer.zero_grad(set_to_none=False)
        elif kind == "a saliency map":
            x = s.rows().requires_grad_()
            torch.autograd.grad(model.module(x).sum(), x)
            model(s.rows()).mean().backward()
        elif kind == "another optimizer":
            with model.no_sync():
                model(s.rows()).mean().backward()
            other.param_groups[0]["params"][0].grad = torch.ones(2)
            other.step()
            model(s.rows()).mean().backward()
        elif kind == "LocalSGD":
            model(s.rows()).mean().backward()
        elif kind == "LocalSGD, all under no_sync":
            with model.no_sync():
                model(s.rows()).mean().backward()
        else:
            for part in model.microbatches(s.rows(4), 2):
                model.backward(model(part).mean(), weight=len(part))
        (local or zero or sharded or optimizer).step()


@pytest.mark.parametrize(
    "kind",
    [
        "by hand",
        "by hand, under no_sync",
        "a penalty first",
        "a probe",
        "a saliency map",
        "another optimizer",
        "LocalSGD",
        "LocalSGD, all under no_sync",
        "ZeRO",
        "ShardedOptimizer",
        "micro-batches",
    ],
)
def test_what_is_averaged_some_other_way_gets_no_warning(ranks, fresh_seed, kind):
    assert ranks.run(told, 2, averaged_some_other_way, fresh_seed, kind) == [[], []]


def in_backward(seed, kind):
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    world = evenstep.init(quiet=False)
    torch.manual_seed(seed)
    module = net()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    model = evenstep.DistributedDataParallel(module, world=world)
    for _ in range(4):
        model(torch.randn(3, 4)).mean().backward()


def test_optimizers_that_step_within_the_backward_pass_get_no_warning(ranks, fresh_seed):
    assert ranks.run(told, 2, in_backward, fresh_seed, "") == [[], []]


# ---------------------------------------------------------------------- slipped steps


def slips(seed, kind):
    """Each rank leaves something out once, rank 0 first; so all of them meet equally often."""
    s = Setting(seed)
    loader = evenstep.DataLoader(torch.arange(100.0).unsqueeze(1).expand(-1, 4), global_batch_size=12, shuffle=False)
    number = 0
    for x in loader:
        number += 1
        leaves_out = number == 3 + 2 * s.world.rank
        if leaves_out and kind == "the batch":
            continue
        s.optimizer.zero_grad()
        loss = s.model(x).mean()
        if leaves_out and kind == "what follows the forward pass":
            continue
        if not (leaves_out and kind == "the backward pass"):
            loss.backward()
        if not (leaves_out and kind == "the optimizer's step"):
            s.optimizer.step()


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize(
    "kind", ["the batch", "what follows the forward pass", "the backward pass", "the optimizer's step"]
)
def test_ranks_that_leave_out_a_part_of_a_step_are_named_once(ranks, fresh_seed, nproc, kind):
    first, *others = ranks.run(told, nproc, slips, fresh_seed, kind)
    assert others == [[]] * (nproc - 1)
    (text,) = first
    assert text.startswith("ranks are out of step")
    counted = {
        "the batch": "training batches drawn",
        "what follows the forward pass": "training batches drawn",
        "the backward pass": "optimizer steps",
        "the optimizer's step": "optimizer steps",
    }[kind]
    assert counted in text or kind == "what follows the forward pass"
    assert "weight=0" in text


def a_forward_forgotten(seed, kind):
    """Without a loader of evenstep's."""
    s = Setting(seed)
    for number in range(6):
        loss = s.model(s.rows()).mean()
        if number == 2 + s.world.rank:
            continue
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()


def test_a_forward_pass_without_a_backward_pass_on_each_rank_is_named(ranks, fresh_seed):
    first, second = ranks.run(told, 2, a_forward_forgotten, fresh_seed, "")
    assert len(first) == 1
    assert "forward passes without a backward pass" in first[0]
    assert second == []


def steps_alike(seed, kind):
    world = evenstep.init(quiet=False)
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "evaluation before the loop" and world.rank == 0:
        for _ in range(3):
            model(torch.randn(2, 4))  # in training mode, with gradients
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20 if kind == "a scaler" else 1.0)
    around = model.join() if kind == "join" else contextlib.nullcontext()
    with around:
        for number in range(4 + (kind == "join") * 2 * world.rank):
            optimizer.zero_grad()
            if kind == "unequal micro-batches":
                for _ in range(world.rank + number % 2):
                    with model.no_sync():
                        model.backward(model(torch.randn(2, 4)).mean(), weight=2)
            elif kind == "unequal parts":
                for part in model.microbatches(torch.randn(2 + 4 * world.rank, 4), 3):
                    model.backward(model(part).mean(), weight=len(part))
                optimizer.step()
                continue
            elif kind == "out of memory" and number % 2 == world.rank:
                with contextlib.suppress(RuntimeError):
                    fail_within(model)
            elif kind == "two forward passes":
                model(torch.randn(2, 4))
            elif kind == "validation on one rank" and world.rank == 0 and number > 1:
                model.eval()
                model(torch.randn(2, 4))
                model.train()
            loss = model(torch.randn(3, 4)).mean()
            if kind == "a cell":
                for _ in range(number * world.rank):
                    loss = loss + model(torch.randn(3, 4) + loss).mean()
            elif kind == "several outputs":
                two = model.module[2].register_forward_hook(lambda _, inputs, output: (output, inputs[0]))
                for _ in range(number * world.rank):
                    with model.no_sync():
                        model.backward(model(torch.randn(3, 4))[0].mean(), weight=3)
                two.remove()
            if kind == "a scaler":
                if number == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                continue
            model.backward(loss, weight=3)
            if kind != "every other pass" or number % 2:
                optimizer.step()


def adversaries(seed, kind):
    """The generator runs for the discriminator's step, too; ranks with an empty share run neither."""
    world = evenstep.init(quiet=False)
    torch.manual_seed(seed)
    generator, critic = (evenstep.DistributedDataParallel(net()) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, critic)]
    for number in range(8):
        batch = torch.randn(0 if number % 4 == world.rank else 4, 4)
        for x in critic.microbatches(batch):
            fake = generator(x).detach().expand(-1, 4)
            critic.backward(critic(x).mean() - critic(fake).mean(), weight=len(x))
        optimizers[1].step()
        for x in generator.microbatches(batch):
            generator.backward(generator(x).mean(), weight=len(x))
        optimizers[0].step()


def test_adversaries_with_empty_shares_get_no_warning(ranks, fresh_seed):
    assert ranks.run(told, 2, adversaries, fresh_seed, "") == [[], []]


def fail_within(model: evenstep.DistributedDataParallel) -> None:
    handle = model.module[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    try:
        model(torch.randn(3, 4))
    finally:
        handle.remove()


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        "evaluation before the loop",
        "join",
        "unequal micro-batches",
        "unequal parts",
        "out of memory",
        "two forward passes",
        "validation on one rank",
        "a cell",
        "several outputs",
        "a scaler",
        "every other pass",
    ],
)
def test_ranks_that_keep_step_get_no_warning(ranks, fresh_seed, nproc, kind):
    assert ranks.run(told, nproc, steps_alike, fresh_seed, kind) == [[]] * nproc
