"""`buffers=`: module buffers that are statistics of all ranks' samples."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, MismatchError
from tests.ranks import on_ranks


class Counting(nn.Module):
    """Counts samples, keeps a decaying mean of them, and what each rule needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("own", torch.zeros(()))
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += len(x)
                self.total = self.total + x.sum(0)  # another tensor each time
                self.mean.mul_(0.9).add_(0.1 * x.double().mean(0))
                self.own += x.sum()
                self.first += x.sum()
                self.cache += x.sum(0)
        return self.layer(x)


RULES = {"mean": "mean", "seen": "sum", "[tc]*": "sum", "own": "own"}


@pytest.mark.parametrize("num_passes", [1, 3])
@on_ranks(2, 3)
def test_statistics_are_those_of_all_ranks_samples(world: evenstep.World, fresh_seed: int, num_passes: int) -> None:
    torch.manual_seed(fresh_seed)
    drawn = torch.Generator().manual_seed(fresh_seed)
    model = evenstep.DistributedDataParallel(Counting(), buffers=RULES, broadcast_buffers=True)
    size, own = world.world_size, 0.0
    seen, total, mean = 0, torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    for step in range(6):
        empty = step % (size + 1)  # the rank without samples; in some steps none
        shares = [torch.randn(num_passes, 0 if rank == empty else 4, 3, generator=drawn) for rank in range(size)]
        model.zero_grad()
        before = mean.clone()
        for number, x in enumerate(shares[world.rank]):
            model.engine.synchronise = number == num_passes - 1
            loss = model(x).sum()
            model.backward(loss / max(1, len(x)), weight=len(x))
        after = []
        for rank, share in enumerate(shares):
            its = before.clone()
            for x in share if rank != empty else ():
                its = 0.9 * its + 0.1 * x.double().mean(0)
                seen += len(x)
                total = total + x.sum(0)
            if rank != empty:
                after.append(its)
        mean = torch.stack(after).mean(0)
        own += float(shares[world.rank].sum())
        torch.testing.assert_close(model.module.mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.module.total, total, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.module.cache, total, rtol=1e-4, atol=1e-4)
        assert int(model.module.seen) == seen
        assert model.module.own.item() == pytest.approx(own, abs=1e-3)
        told = world.exchange([model.module.total.tolist(), model.module.cache.tolist(), float(model.module.first)])
        assert told[1:] == told[:-1]
        if step == 2:  # between two steps a script may set them
            model.load_state_dict({**model.state_dict(), "module.seen": torch.tensor(1000)})
            seen = 1000


@on_ranks(2)
def test_bad_rules_are_refused_on_all_ranks(world: evenstep.World) -> None:
    for rules, words in (
        ({"codebok": "mean"}, "matches no buffer"),
        ({"mean": "average"}, "'rank 0', 'mean', 'sum', 'own'"),
        ({"seen": "mean"}, "has no mean"),
        (["mean"], "a dictionary"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            evenstep.DistributedDataParallel(Counting(), buffers=rules)
    with pytest.raises(MismatchError, match="buffers"):
        evenstep.DistributedDataParallel(Counting(), buffers={"seen": "sum"} if world.rank else None)


def test_virtual_ranks_have_no_statistics() -> None:
    with (
        evenstep.init(quiet=True, device="cpu", reproducible=True, seed=0),
        pytest.raises(ConfigurationError, match="buffers= would add over ranks"),
    ):
        evenstep.DistributedDataParallel(Counting(), buffers={"seen": "sum"})


def test_a_dummy_batch_changes_no_buffer_also_where_the_module_replaces_it() -> None:
    with evenstep.World.alone(device="cpu") as world:
        model = evenstep.DistributedDataParallel(Counting(), world=world)
        model(torch.ones(2, 3))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        held = model.module.total
        model(torch.ones(0, 3))
        assert model.module.total is held
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("init_sync", [True, False])
@on_ranks(2)
def test_statistics_begin_equal(world: evenstep.World, init_sync: bool) -> None:
    """Statistics that each rank has drawn for itself begin as rank 0's, also where other buffers are left alone."""
    torch.manual_seed(world.rank)
    module = Counting()
    with torch.no_grad():
        for each in (module.mean, module.own, module.first):
            each.uniform_()
        if not init_sync:
            for parameter in module.parameters():
                parameter.zero_()
    own = module.own.item()
    model = evenstep.DistributedDataParallel(
        module, buffers={"mean": "mean", "own": "own"}, broadcast_buffers=False, init_sync=init_sync
    )
    for _ in range(2):
        assert len(set(map(tuple, world.exchange(module.mean.tolist())))) == 1
        model(torch.randn(3, 3)).sum().backward()
    assert len(set(world.exchange(module.first.item()))) == world.world_size
    assert module.own.item() != own


class Lazy(nn.Module):
    """Makes its codebook with the first samples; a normalisation without statistics has buffers that never come."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)
        self.register_buffer("codebook", None)
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.codebook is None:
            self.codebook = torch.ones(3)
        with torch.no_grad():
            self.codes += 1
        return self.norm(self.layer(x))


@on_ranks(2)
def test_a_statistic_that_comes_later_is_named(world: evenstep.World) -> None:
    with pytest.raises(ConfigurationError, match=r"'codebook' matches no buffer.*run it once before you wrap it"):
        evenstep.DistributedDataParallel(Lazy(), buffers={"codebook": "mean"})
    model = evenstep.DistributedDataParallel(Lazy(), buffers={"*": "mean"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(3, 3)).square().sum().backward()
    assert model.module.codes.tolist() == [2.0, 2.0]
    told = [str(each.message) for each in caught if "was created after" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("buffers: 'codebook' was created after the module was wrapped")
