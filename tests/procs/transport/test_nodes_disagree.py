"""Ranks of several nodes that call different things, or that refuse what they were given: one error on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, PeerLostError
from evenstep.testing import RankPool
from evenstep.transport.base import Collective, Row
from evenstep.transport.core.transport import Transport

from .test_internode import new_transport

DOUBLE, LONG = torch.float64, 1 << 19  # 2 MiB of float32: more than one chunk

Make = Callable[[Transport, bool], Any]  # a call of a rank, and whether that is the odd one


def in_and_out(transport: Transport, is_odd: bool) -> Any:
    """Of a long and a short tensor none can be both."""
    given = torch.ones(transport.world_size * 3)
    return transport.reduce_scatter(given if is_odd else torch.empty(3), given)


def summed(transport: Transport, tensor: torch.Tensor, row: Row | None, plain: float) -> Any:
    """A sum of gradients."""
    return transport.run(Collective("all_reduce", tensor, tensor, "sum", row=row, plain=plain))


REFUSED: dict[str, tuple[str, Make]] = {
    "sparse": (
        "sparse_coo float32",
        lambda t, odd: t.all_reduce(torch.eye(3).to_sparse() if odd else torch.eye(3)),
    ),
    "op": (
        "neither true nor false",
        lambda t, odd: t.all_reduce(torch.ones(3, dtype=torch.bool), "mean" if odd else "sum"),
    ),
    "root": ("src=77", lambda t, odd: t.broadcast(torch.ones(3), 77 if odd else 0)),
    "long root": ("src=77", lambda t, odd: t.broadcast(torch.ones(LONG), 77 if odd else 1)),
    "share": (
        "times the elements of tensor",
        lambda t, odd: t.all_gather(torch.empty(t.world_size * 3 + odd), torch.ones(3)),
    ),
    "long share": (
        "times the elements of out",
        lambda t, odd: t.reduce_scatter(torch.empty(70_000 + odd), torch.ones(t.world_size * 70_000)),
    ),
    "the same tensor twice": ("times the elements of out", lambda t, odd: in_and_out(t, odd)),
    "no place": (
        "share memory",
        lambda t, odd: t.all_reduce(torch.ones(1).expand(LONG) if odd else torch.ones(LONG)),
    ),
    "no place of a share": (
        "share memory",
        lambda t, odd: t.scatter(torch.ones(1).expand(3) if odd else torch.ones(3), torch.ones(t.world_size * 3), 0),
    ),
    "divisor of integers": (
        "a divisor needs a sum of real or complex floats, not sum of int32",
        lambda t, odd: summed(t, torch.ones(3, dtype=torch.int32 if odd else torch.float32), Row(2.0, 1.0, 0.0), 4.0),
    ),
    "splits": (
        "out_splits",
        lambda t, odd: t.all_to_all(
            torch.empty(t.world_size), torch.ones(t.world_size), [1] * t.world_size, [1 + odd] * t.world_size
        ),
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[str, Make]] = {
    "shape": ("float32 [3, 2]", lambda t, odd: t.all_reduce(torch.ones((3, 2) if odd else (2, 3)))),
    "dtype": (
        "int32 [6]",
        lambda t, odd: t.all_reduce(torch.ones(6, dtype=torch.int32 if odd else torch.float32)),
    ),
    "long": (f"float32 [{LONG + 1}]", lambda t, odd: t.all_reduce(torch.ones(LONG + odd))),
    "middle": ("float32 [50001]", lambda t, odd: t.all_reduce(torch.ones(50_000 + odd))),
    "root": ("broadcast from rank 1", lambda t, odd: t.broadcast(torch.ones(6), int(odd))),
    "collective": (
        "reduce(sum) to rank 0",
        lambda t, odd: t.reduce(torch.ones(6), 0) if odd else t.all_reduce(torch.ones(6)),
    ),
    "all_gather": (
        "float32 [5]",
        lambda t, odd: t.all_gather(torch.empty(t.world_size * (4 + odd)), torch.ones(4 + odd)),
    ),
    "scatter": (
        "scatter",
        lambda t, odd: t.scatter(torch.ones(3 + odd), torch.ones(t.world_size * (3 + odd)), 0),
    ),
    "gather": (
        "float32 [3]",
        lambda t, odd: t.gather(torch.ones(t.world_size * (2 + odd)) if t.rank == 0 else None, torch.ones(2 + odd), 0),
    ),
    "long gather": (
        "float32 [9001]",
        lambda t, odd: t.gather(
            torch.ones(t.world_size * (9_000 + odd)) if t.rank == 0 else None, torch.ones(9_000 + odd), 0
        ),
    ),
    "all_to_all": (
        "barrier",
        lambda t, odd: t.barrier() if odd else t.all_to_all(torch.ones(t.world_size), torch.ones(t.world_size)),
    ),
    "divisor": (
        "divided by the weights or by 5",
        lambda t, odd: summed(t, torch.ones(LONG), Row(2.0, 1.0, 0.0), 5.0 if odd else 4.0),
    ),
    "divisor or none": (
        "all_reduce(sum) of float32 [3]",
        lambda t, odd: summed(t, torch.ones(3), None if odd else Row(2.0, 1.0, 0.0), 4.0),
    ),
    "beside": (
        "7 float64 numbers beside it",
        lambda t, odd: t.all_reduce(torch.ones(3), beside=torch.zeros(5 + 2 * odd, dtype=torch.float64)),
    ),
    "beside, of another dtype": (
        "5 float64 numbers beside it",
        lambda t, odd: t.all_reduce(torch.ones(LONG), beside=torch.zeros(5, dtype=DOUBLE if odd else torch.float32)),
    ),
    "beside or not": (
        "5 float32 numbers beside it",
        lambda t, odd: t.all_reduce(torch.ones(3), beside=torch.zeros(5) if odd else None),
    ),
    "over gloo": (
        "all_reduce over gloo",
        lambda t, odd: t.compare_call("all_reduce over gloo") if odd else t.all_reduce(torch.ones(3)),
    ),
}  # fmt: skip


def errors(names: str, odd: int, cases: dict[str, tuple[str, Make]]) -> list[str]:
    """Of every case: what this rank is told by the call itself, and by the next one; and how long that took."""
    first, told = new_transport(names), []
    for name, (_, make) in cases.items():
        transport = first.split()
        for numel in (3, 5_000):
            transport.all_reduce(torch.ones(numel)).wait()  # calls that have gone well before
        is_odd = transport.rank == odd
        said, started = "", time.monotonic()
        try:
            make(transport, is_odd).wait()
        except (ConfigurationError, MismatchError) as error:
            said = f"{error} | "
        with pytest.raises(MismatchError) as again:
            transport.barrier().wait()
        took_s = time.monotonic() - started
        assert took_s < 25, (name, took_s)  # the deadline is 30
        told.append(f"{said}{again.value}")
        transport.close()
    first.close()
    return told


def globals_of(what: str) -> dict[str, tuple[str, Make]]:
    return {"refused": REFUSED, "others": OTHERS}[what]


def errors_of(names: str, odd: int, what: str) -> list[str]:
    return errors(names, odd, globals_of(what))


# Nodes of two ranks each; of one each, because they have different numbers of ranks.
PLACES = [("aabb", 3), ("aab", 1), ("aab", 2), pytest.param("abbab", 4, marks=pytest.mark.extended)]


@pytest.mark.parametrize(("names", "odd"), PLACES)
def test_what_one_rank_refuses_is_an_error_on_all_at_once(ranks: RankPool, names: str, odd: int) -> None:
    told = ranks.run(errors_of, len(names), names, odd, "refused", timeout_s=150)
    for number, (name, (reason, _)) in enumerate(REFUSED.items()):
        of_ranks = [each[number] for each in told]
        own, _, then = of_ranks[odd].partition(" | ")
        assert reason in own, (name, own)
        assert f"Rank {odd}: {own}" in then, (name, then)
        assert f"over {'shared memory + gloo' if names == 'aabb' else 'gloo'}. " in then
        others = {each for rank, each in enumerate(of_ranks) if rank != odd}
        assert others == {f"{then} | {then}"}, (name, others)


@pytest.mark.parametrize(("names", "odd"), PLACES)
def test_what_one_rank_calls_otherwise_is_the_same_error_on_all(ranks: RankPool, names: str, odd: int) -> None:
    told = ranks.run(errors_of, len(names), names, odd, "others", timeout_s=150)
    for number, (name, (words, _)) in enumerate(OTHERS.items()):
        of_ranks = {each[number] for each in told}
        assert len(of_ranks) == 1, (name, of_ranks)
        (said,) = of_ranks
        assert f"rank {odd}: " in said, (name, said)
        assert words in said.partition(f"rank {odd}: ")[2], (name, said)


def unlike_splits(names: str, sent: int) -> str:
    """Everybody sends two elements to each, but the last rank another number to the first, which expects two."""
    transport = new_transport(names)
    size, splits = transport.world_size, [2] * transport.world_size
    transport.all_to_all(torch.empty(2 * size), torch.ones(2 * size), splits, splits).wait()
    given = [sent, *splits[1:]] if transport.rank == size - 1 else splits
    with pytest.raises(MismatchError) as caught:
        transport.all_to_all(torch.empty(2 * size), torch.ones(sum(given)), splits, given).wait()
    transport.close()
    return str(caught.value)


@pytest.mark.parametrize("sent", [1, 3])
@pytest.mark.parametrize("names", ["aaa", "aabb", "aab"])
def test_who_is_sent_another_number_than_it_expects_is_the_same_error_on_all(
    ranks: RankPool, names: str, sent: int
) -> None:
    told = set(ranks.run(unlike_splits, len(names), names, sent))
    assert len(told) == 1
    assert f"rank {len(names) - 1} sends {sent} elements to rank 0, which expects 2." in told.pop()


def stay_away() -> str:
    """Rank 3, number 1 on its node, closes; what error does rank 2 raise?"""
    transport = new_transport("aabb")
    transport.barrier().wait()
    world = evenstep.init(quiet=True)
    text = ""
    if transport.rank == 3:
        transport.close()
    else:
        with pytest.raises(PeerLostError) as caught:
            transport.all_reduce(torch.ones(3)).wait()
        text = str(caught.value)
    world.barrier()
    transport.close()
    return text


def test_ranks_have_the_worlds_numbers_in_messages(ranks: RankPool) -> None:
    told = ranks.run(stay_away, 4)
    assert told[2].startswith("rank 2 lost rank 3 (pid ")
    for rank, each in enumerate(told[:2]):
        assert each.startswith(f"rank {rank} lost a peer in all_gather"), each
