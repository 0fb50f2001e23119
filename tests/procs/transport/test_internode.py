"""Ranks of several nodes: played by ranks of one node that say they are on different ones."""

import contextlib
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import evenstep
from evenstep.errors import EvenstepError, MismatchError
from evenstep.testing import RankPool
from evenstep.testing.transport import DTYPES, Coverage, check_transport
from evenstep.transport import factory
from evenstep.transport.base import Work
from evenstep.transport.core.fallback import fallback
from evenstep.transport.core.transport import Transport
from evenstep.transport.factory import open_transports
from evenstep.transport.internode.negotiation import EAGER_BYTES, MESSAGE_BYTES, PAYLOAD_AT, CallPrediction
from evenstep.transport.internode.plan import is_predictable, plan_chunk_bytes
from evenstep.transport.internode.transport import InternodeTransport
from tests import namespaces

SHAPES = ((), (0,), (1,), (3, 5), (1021,), (16_385,))
SOME_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)


@contextlib.contextmanager
def on_nodes(names: str) -> Iterator[None]:
    """Rank r says that it is on node `names[r]`."""
    genuine = factory.describe_this_process
    with mock.patch.object(factory, "describe_this_process", lambda rank: genuine(rank) | {"boot": names[rank]}):
        yield


def new_transport(names: str) -> InternodeTransport:
    evenstep.init(quiet=True)
    with on_nodes(names):
        both = open_transports(None, torch.device("cpu"), timeout_s=30)
    both.control.barrier().wait()  # or it would be closed while others still connect to it
    both.control.close()
    assert isinstance(both.gradients, InternodeTransport)
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


def repeated(names: str, seed: int) -> tuple[int, int, list[str]]:
    """The same random calls again and again. How many were predicted, of how many that can be, and what was wrong."""
    transport, wrong, can_be = new_transport(names), [], 0
    draw = random.Random(seed)
    calls = [
        (draw.choice([1, 900, 5_000, 5_000, 20_011, 100_003, 262_144, 300_000]), draw.choice(["sum", "mean", "max"]))
        for _ in range(11)
    ]
    calls.insert(0, (5_000, "sum"))  # in 16 bits, short enough for any number of nodes
    for turn in range(4):
        for number, (numel, op) in enumerate(calls):
            dtype = torch.float64 if number % 3 else torch.bfloat16
            generator = torch.Generator().manual_seed(seed + turn)
            every = [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in names]
            mine = every[transport.rank].clone()
            transport.all_reduce(mine, op).wait()
            stacked = torch.stack(every).double()
            expected = stacked.amax(0) if op == "max" else stacked.sum(0) / (len(names) if op == "mean" else 1)
            if not torch.allclose(mine.double(), expected, rtol=1e-2, atol=1e-2 if op == "mean" else 0):
                wrong.append(f"turn {turn}, call {number}: {op} of {numel}")
            can_be += turn > 1 and mine.nbytes > EAGER_BYTES and transport._steps.own_slice(mine).numel() > 0
    predicted = transport._steps.headers.num_predicted
    transport.close()
    return predicted, can_be, wrong


@pytest.mark.extended
@pytest.mark.parametrize("names", ["aab", "abab", "aabc", "abbab"])
def test_calls_that_come_again_take_their_data_along(ranks: RankPool, names: str, fresh_seed: int) -> None:
    told = ranks.run(repeated, len(names), names, fresh_seed)
    assert [wrong for _, _, wrong in told] == [[]] * len(names)
    for predicted, can_be, _ in told:
        assert predicted >= can_be
    assert told[0][1] > 0


def odd_tensors() -> None:
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


def test_odd_tensors(ranks: RankPool) -> None:
    ranks.run(odd_tensors, 4)


class Counted:
    """An inter-node group that counts what it sends, as Gloo would: (messages one after the other, bytes)."""

    def __init__(self, group: Transport) -> None:
        self._group, self.sent = group, [0, 0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _count(self, num_messages: int, num_bytes: int) -> None:
        self.sent[0] += num_messages
        self.sent[1] += num_bytes

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        ring = self._group.world_size - 1
        self._count(ring, ring * tensor.nbytes)
        return self._group.all_gather(out, tensor)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, *splits: Any) -> Work:
        mine = tensor.nbytes // self._group.world_size
        self._count(1, tensor.nbytes - mine)
        return self._group.all_to_all(out, tensor, *splits)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        doublings = (self._group.world_size - 1).bit_length()
        self._count(doublings, doublings * tensor.nbytes if self._group.rank == src else 0)
        return self._group.broadcast(tensor, src)


def call_of(transport: Transport, name: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], Work]:
    return {
        "all_reduce": lambda: transport.all_reduce(whole),
        "reduce_scatter": lambda: transport.reduce_scatter(part, whole),
        "all_gather": lambda: transport.all_gather(whole, part),
        "broadcast": lambda: transport.broadcast(whole, 0),
    }[name]


def counted_calls(names: str, calls: list[tuple[str, int]]) -> list[list[int]]:
    """What this rank sends in each call, once it is expected: [messages, bytes]."""
    transport = new_transport(names)
    n = transport.world_size
    told = []
    for name, num_bytes in calls:
        call = call_of(transport, name, torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4 // n))
        for _ in range(10):
            call().wait()
        counted = Counted(transport._inter_node)
        transport._steps._inter_node = transport._steps.headers._inter_node = counted
        call().wait()
        transport._steps._inter_node = transport._steps.headers._inter_node = counted._group
        told.append(counted.sent)
    transport.close()
    return told


def expected_messages(name: str, num_bytes: int, num_nodes: int, ranks_per_node: int) -> tuple[int, int, float]:
    """(messages that compare the call, messages of each piece of it, bytes that leave a node).

    A short vector travels with the first messages, and so does a predicted all-reduce. Every rank of a node sends to
    the ranks of its inter-node group. Gloo's all-gather is a ring, its all-to-all sends everything at once, its
    broadcast doubles the ranks that have the vector.
    """
    h, k = num_nodes, ranks_per_node
    ring = h - 1
    of_a_rank = num_bytes if name == "all_reduce" else num_bytes / (h * k)
    if name in ("all_reduce", "all_gather") and of_a_rank <= EAGER_BYTES:
        return ring, 0, ring * k * MESSAGE_BYTES
    if name == "all_reduce" and is_predictable(num_bytes, num_bytes / k, h):
        return ring, 0, ring * k * max(MESSAGE_BYTES, PAYLOAD_AT + num_bytes / k)
    comparing_bytes = ring * k * MESSAGE_BYTES
    if name == "all_reduce":  # two nodes swap their sums; more scatter and gather them
        return ring, 1 if h == 2 else 1 + ring, comparing_bytes + 2 * ring / h * num_bytes
    if name == "broadcast":
        doublings = (h - 1).bit_length()
        return ring, doublings, comparing_bytes + doublings * num_bytes
    return ring, 1 if name == "reduce_scatter" else ring, comparing_bytes + ring / h * num_bytes


@pytest.mark.parametrize("names", ["aabb", pytest.param("aabbcc", marks=pytest.mark.extended)])
def test_nodes_send_no_more_messages_and_bytes_than_a_call_needs(ranks: RankPool, names: str) -> None:
    """For every way that a call can go, in the groups of the first node."""
    num_nodes = len(set(names))
    sizes = [96, 48_000, 1 << 20, 960_000 * 4]
    collectives = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    calls = [(name, size // 4 // len(names) * len(names) * 4) for name in collectives for size in sizes]
    told = ranks.run(counted_calls, len(names), names, calls)
    for number, (name, num_bytes) in enumerate(calls):
        (num_messages, num_bytes_of_rank_0), (others_messages, num_bytes_of_rank_1) = (
            each[number] for each in told[:2]
        )
        assert num_messages == others_messages
        comparing, of_a_piece, expected_bytes = expected_messages(name, num_bytes, num_nodes, 2)
        num_pieces = -(-num_bytes // plan_chunk_bytes(num_bytes)) if name == "all_reduce" and of_a_piece else 1
        assert num_messages == comparing + num_pieces * of_a_piece, (name, num_bytes)
        padding = 4096 * num_nodes  # slices begin at multiples of a page or less
        sent = num_bytes_of_rank_0 + num_bytes_of_rank_1
        assert sent == pytest.approx(expected_bytes, abs=padding), (name, num_bytes)


def disagree_on_what_was_expected() -> str:
    transport = new_transport("aabb")
    for _ in range(8):
        for numel in (5_000, 20_000):
            transport.all_reduce(torch.ones(numel)).wait()
    assert transport._steps.headers.num_predicted
    transport.all_reduce(torch.ones(5_000)).wait()
    with pytest.raises(EvenstepError) as caught:
        transport.all_reduce(torch.ones(20_000 if transport.rank < 2 else 30_000)).wait()
    transport.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_call_that_one_node_predicted_and_the_other_did_not_make_is_named(ranks: RankPool) -> None:
    for text in ranks.run(disagree_on_what_was_expected, 4):
        assert text.startswith("MismatchError"), text
        assert "20000" in text
        assert "30000" in text


def test_a_prediction_is_what_came_after_the_same_calls() -> None:
    prediction = CallPrediction()
    sequence = [b"a", b"a", b"a", b"h"]  # three buckets of one size, and a header
    for number in range(40):
        if number >= 12:  # everything has been seen behind eight calls
            assert prediction.expected == (sequence[number % 4], number % 4)
        prediction.record(sequence[number % 4], number % 4)
    prediction.record(b"x", 0)
    assert prediction.expected is None


def disagree() -> str:
    transport = new_transport("aabb")
    tensor = torch.zeros(3 if transport.rank < 2 else 5)
    with pytest.raises(EvenstepError) as caught:
        transport.all_reduce(tensor).wait()
    with pytest.raises(EvenstepError):
        transport.barrier().wait()
    transport.close()
    assert isinstance(caught.value, MismatchError)
    return str(caught.value)


def test_nodes_that_call_different_things_raise_the_same_error(ranks: RankPool) -> None:
    told = ranks.run(disagree, 4)
    assert len(set(told)) == 1
    assert "ranks 0, 1: all_reduce(sum) of float32 [3]; ranks 2, 3: all_reduce(sum) of float32 [5]" in told[0]


def train(names: str, seed: int) -> tuple[str, list[torch.Tensor], dict[str, int]]:
    """Three steps of a model in which module buffers travel too, in a world of several nodes."""
    before = evenstep.init(quiet=True)
    fallback.reset()
    torch.manual_seed(seed)
    with on_nodes(names):
        world = evenstep.World.from_process_group()
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 3)).double()
    wrapped = evenstep.DistributedDataParallel(model, world=world)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = torch.randn(3, world.world_size, 7, 40, dtype=torch.float64)
    for step in data:
        rows = step[world.rank][: 5 + world.rank % 3]
        wrapped.backward(wrapped(rows).square().mean(), weight=len(rows))
        optimizer.step()
        optimizer.zero_grad()
    name = world.transport_name
    mean = world.mean(float(world.rank))
    world.close()
    assert before.rank == world.rank
    assert float(mean) == (world.world_size - 1) / 2
    return name, [p.detach() for p in model.parameters()], fallback.counts()


def test_a_model_learns_the_same_as_on_one_node(ranks: RankPool, fresh_seed: int) -> None:
    """Nothing the engine does needs more than what has a way of its own."""
    alone = ranks.run(train, 4, "aaaa", fresh_seed)
    several = ranks.run(train, 4, "aabb", fresh_seed)
    assert {name for name, _, _ in alone} == {"shared memory"}
    assert {name for name, _, _ in several} == {"shared memory + gloo"}
    for (_, expected, _), (_, got, fallen) in zip(alone, several, strict=True):
        assert fallen == {}
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


SCRIPT = """
import sys
import torch
import evenstep

with evenstep.init(quiet=True, device="cpu") as world:
    vector = torch.arange(100_000, dtype=torch.float32) + world.rank
    world.transport.all_reduce(vector).wait()
    expected = world.world_size * torch.arange(100_000, dtype=torch.float32) + sum(range(world.world_size))
    node_ranks = world.gather(torch.tensor([world.node_rank])).tolist()
    if world.is_main:
        with open(sys.argv[1], "w") as told:
            told.write(f"{world.transport_name} {node_ranks} {torch.equal(vector, expected)}")
"""


@pytest.mark.extended
@pytest.mark.skipif(namespaces.why_not() is not None, reason=f"no network namespaces: {namespaces.why_not()}")
def test_real_addresses_and_process_numbers(tmp_path: Path) -> None:
    """Two namespaces, which share neither: what the ranks say of themselves keeps the nodes apart."""
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(SCRIPT)
    with namespaces.Namespaces(2) as hosts:
        started = [
            subprocess.Popen(
                hosts.evenstep_run(host, ["--nproc-per-node", "2", "--log-dir", str(tmp_path), str(script), str(told)]),
                env={**os.environ, **hosts.environment(host)},
            )
            for host in range(2)
        ]
        assert [process.wait(timeout=120) for process in started] == [0, 0]
    assert told.read_text() == "shared memory + gloo [0, 0, 1, 1] True"


def call_in_a_fork() -> str:
    transport = new_transport("aab")
    transport.all_reduce(torch.ones(3)).wait()  # its thread runs
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "no error"
        try:
            transport.all_reduce(torch.ones(3)).wait()
        except evenstep.errors.UsageError as error:
            said = str(error)
        finally:
            transport.close()
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said_there:
        found = said_there.read()
    os.waitpid(pid, 0)
    transport.all_reduce(torch.ones(3)).wait()
    transport.close()
    return found


def test_a_forked_child_does_not_wait_for_the_thread(ranks: RankPool) -> None:
    for said in ranks.run(call_in_a_fork, 3, timeout_s=30):
        assert said == "this process was forked from a rank; only ranks can call collectives."
