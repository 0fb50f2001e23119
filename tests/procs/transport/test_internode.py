"""Ranks of several nodes: played by ranks of one node that say they are on different ones."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import evenstep
from evenstep.errors import EvenstepError
from evenstep.testing import RankPool
from evenstep.transport import factory
from evenstep.transport.factory import open_transports
from evenstep.transport.internode.transport import InternodeTransport
from tests.ranks import on_ranks
from tests.transport_cases import DTYPES, Coverage, check_transport

SHAPES = ((), (0,), (1,), (3, 5), (1021,), (16_385,))
SOME_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)


@contextlib.contextmanager
def on_nodes(names: str) -> Iterator[None]:
    """Rank r says that it is on node `names[r]`."""
    said = factory.describe_this_process() | {"boot": names[int(os.environ["RANK"])]}
    with mock.patch.object(factory, "describe_this_process", return_value=said):
        yield


def new_transport(names: str) -> Any:
    """An InternodeTransport, or that of one node."""
    evenstep.init(quiet=True)
    with on_nodes(names):
        both = open_transports(None, torch.device("cpu"), timeout_s=30)
    both.control.barrier().wait()  # or it would be closed while others still connect to it
    both.control.close()
    assert isinstance(both.gradients, InternodeTransport) is (len(set(names)) > 1)
    return both.gradients


def conforms(names: str, seed: int) -> int:
    dtypes = DTYPES if names == "aabb" else SOME_DTYPES
    return check_transport(lambda: new_transport(names), Coverage(dtypes=dtypes, shapes=SHAPES, seed=seed))


@pytest.mark.extended
@pytest.mark.parametrize("names", ["aab", "aabb", "abab", "abbab"])
def test_it_conforms(ranks: RankPool, names: str, fresh_seed: int) -> None:
    """Equal nodes, nodes of different sizes, and ranks dealt out in turn."""
    assert min(ranks.run(conforms, len(names), names, fresh_seed, timeout_s=150)) > 200


def sums_of_pieces(names: str, seed: int, numel: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    transport = new_transport(names)
    every = [torch.randn(numel, generator=torch.Generator().manual_seed(seed + r)) for r in range(len(names))]
    bucket = transport.allocate(numel, dtype=torch.float32, device=torch.device("cpu"))
    bucket.copy_(every[transport.rank])
    other = every[transport.rank].clone()
    works = [transport.all_reduce(bucket), transport.all_reduce(other, "max")]
    works[1].wait()
    in_order = works[0].is_completed()
    is_max = torch.equal(other, torch.stack(every).amax(0))
    transport.close()
    # The tree: inside the nodes, then over them.
    return bucket.clone(), (every[0] + every[1]) + (every[2] + every[3]), is_max and in_order


@pytest.mark.extended
def test_long_vectors_are_added_in_the_order_of_the_tree(ranks: RankPool, fresh_seed: int) -> None:
    numel = (20 << 20) // 4 + 12_345  # three pieces
    results = ranks.run(sums_of_pieces, 4, "aabb", fresh_seed, numel)
    for got, expected, is_right in results:
        assert torch.equal(got, expected)
        assert is_right


def random_calls(names: str, seed: int) -> list[str]:
    """Random calls of many lengths, dtypes and ops, one after the other, in whole and in parts; what was wrong."""
    transport, wrong = new_transport(names), []
    draw = random.Random(seed)
    for number in range(40):
        numel = draw.choice([1, 900, 5_000, 20_011, 100_003, 262_144, 300_000])
        op, dtype = draw.choice(["sum", "mean", "max"]), draw.choice([torch.bfloat16, torch.float64])
        generator = torch.Generator().manual_seed(seed + number)
        every = [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in names]
        mine = every[transport.rank].clone()
        part, parts = torch.empty(numel, dtype=dtype), mine.repeat(len(names))
        parts += torch.arange(len(names)).repeat_interleave(numel)
        transport.reduce_scatter(part, parts, op).wait()
        transport.all_reduce(mine, op).wait()
        stacked = torch.stack(every).double()
        expected = stacked.amax(0) if op == "max" else stacked.sum(0) / (len(names) if op == "mean" else 1)
        more = transport.rank * (len(names) if op == "sum" else 1)
        for got, wanted in ((mine, expected), (part, expected + more)):
            if not torch.allclose(got.double(), wanted, rtol=1e-2, atol=1e-2 if op == "mean" else 0):
                wrong.append(f"call {number}: {op} of {numel}")
    transport.close()
    return wrong


@pytest.mark.parametrize(
    "names", ["ab", "aab", "abab", *(pytest.param(each, marks=pytest.mark.extended) for each in ("aabbcc", "abbab"))]
)
def test_random_calls_have_the_sums_of_one_node(ranks: RankPool, names: str, fresh_seed: int) -> None:
    """Nodes of one rank each, of different sizes, dealt out in turn, and three of them."""
    assert ranks.run(random_calls, len(names), names, fresh_seed) == [[]] * len(names)


@on_ranks(4)
def test_odd_tensors(world: evenstep.World) -> None:
    """A thread of the transport writes the results: also to what was made in inference mode, and to single elements."""
    transport = new_transport("aabb")
    size = transport.world_size
    for mode in (True, False):
        for numel in (5, 200_000):
            with torch.inference_mode(mode):
                total, with_gaps = torch.ones(numel), torch.ones(numel, 2)[:, 0]
                transport.all_reduce(total).wait()
                transport.all_reduce(with_gaps, "max").wait()
            assert (total == size).all()
            assert (with_gaps == 1).all()
    for numel in (0, 1):
        single = torch.full((7,), float(transport.rank))[1::3][:numel]  # contiguous, to torch, with a stride of 3
        out = torch.full((3 * size,), -1.0)[:: 3 if numel else 1][: size * numel]
        transport.all_gather(out, single).wait()
        assert out.tolist() == [0.0, 1.0, 2.0, 3.0][: size * numel]
        transport.all_reduce(single).wait()
        assert single.tolist() == [6.0][:numel]
        transport.broadcast(single, 1).wait()
    transport.close()


@on_ranks(4)
def test_a_node_that_closes_in_a_call_ends_it_on_all_nodes(world: evenstep.World) -> None:
    """By the connections, and not by the deadline: a thread inside Gloo kept them open."""
    transport = new_transport("aabb")
    world = evenstep.init(quiet=True)
    work = transport.all_reduce(torch.ones(3)) if transport.rank < 2 else None
    world.barrier()
    if work is not None:
        transport.close()
    world.barrier()
    with pytest.raises(EvenstepError) as caught:
        (work or transport.all_reduce(torch.ones(3))).wait(10)
    transport.close()
    assert type(caught.value).__name__ == "PeerLostError"


ENDS = """
import os, pathlib, sys, time
from unittest import mock
import torch, torch.distributed as dist
import evenstep
from evenstep.transport import factory

rank, ends = int(sys.argv[1]), pathlib.Path(sys.argv[2])
genuine = factory.describe_this_process
with mock.patch.object(factory, "describe_this_process", lambda: genuine() | {"boot": str(rank)}):
    dist.init_process_group("evenstep", init_method=f"file://{ends}.store", rank=rank, world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)

class Slow:
    def __del__(self, sleep=time.sleep, touch=ends.touch):  # python releases what modules hold: it is nearly over
        touch()
        sleep(2)

if rank == 0:
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(0.5)
    slow = Slow()
else:
    while not ends.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os._exit(0)
"""


@pytest.mark.extended
def test_a_process_ends_as_usual_while_its_thread_waits_for_another_node(tmp_path: Path) -> None:
    """Its connections close while python ends. A thread that is inside Gloo then is a std::terminate."""
    script, ends = tmp_path / "script.py", tmp_path / "ends"
    script.write_text(ENDS)
    command = [sys.executable, str(script)]
    started = [subprocess.Popen([*command, str(rank), str(ends)], stderr=subprocess.PIPE) for rank in range(2)]
    _, said = started[0].communicate(timeout=120)
    started[1].communicate(timeout=120)
    assert started[0].returncode == 0, said.decode()
