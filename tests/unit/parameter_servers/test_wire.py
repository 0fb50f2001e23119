"""Frames, handshakes and repeated calls, between threads."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenstep.errors import CollectiveTimeoutError, PeerLostError, UsageError
from evenstep.ground.host.network import LOOPBACK
from evenstep.parameter_servers import wire
from evenstep.parameter_servers.wire import Badge, Line, Message
from tests.wire_cases import ATTEMPT_BEFORE, BADGE, OTHER_KEY, Cuts, listening, wait_until

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SHAPES = [(), (0,), (1,), (3, 0, 5), (7,), (2, 3, 4)]


@pytest.fixture(params=["unix", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path if request.param == "unix" else LOOPBACK


@pytest.fixture
def pair() -> Any:
    one, other = socket.socketpair()
    with one, other:
        yield Line(one, 30.0), Line(other, 30.0)


def drawn(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any bits; of a bool 0 and 1."""
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = [*shape[:-1], shape[-1] * dtype.itemsize] if shape else [dtype.itemsize]
    return torch.randint(256, size, generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))


# ---------------------------------------------------------------------- frames


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_as_it_was(dtype: torch.dtype, where: Path | str, fresh_seed: int):
    generator = torch.Generator().manual_seed(fresh_seed)
    sent = [drawn(dtype, shape, generator) for shape in SHAPES]
    whole = drawn(dtype, (4, 6), generator)
    sent += [whole.t(), whole[:, 1::2], whole[1:3], whole[0].expand(3, 6)]  # not contiguous, too
    sent += [drawn(dtype, (600_000,), generator)]  # more than a socket holds
    with listening(where, most_bytes=1 << 24) as place:
        client = place.client()
        answer = client.call("echo", sent, text="ä\n", number=2**70, nothing=None)
    assert answer.head == {"rank": 0, "kind": "echo", "text": "ä\n", "number": 2**70, "nothing": None}
    assert len(answer.tensors) == len(sent)
    for one, other in zip(sent, answer.tensors, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    "head",
    [
        b"\xff\xff\xff\xff",
        struct.pack("!I", wire._MOST_HEADER_BYTES + 1),
        b"garbage!",
        b"{}",
        b'{"tensors": [["float32", [1152921504606846976]]]}',
        b'{"tensors": [["float32", [4294967296, 4294967296]]]}',
        b'{"tensors": [["float32", [-1]]]}',
        b'{"tensors": [["float32", ["x"]]]}',
        b'{"tensors": [["load", [1]]]}',
        b'{"tensors": [["float32"]]}',
        b'{"tensors": [["float32", [25]], ["float64", [13]]]}',
        b"[" * 100_000,
        b'{"tensors": "\xff"}',
    ],
    ids=lambda head: repr(head[:40]),
)
def test_what_is_no_frame_is_an_error_and_takes_no_memory(pair: tuple[Line, Line], head: bytes):
    near, far = pair
    is_whole = head.startswith((b"\xff", b"\x01"))
    near.write(head if is_whole else struct.pack("!I", len(head)) + head, 5.0)
    with pytest.raises(OSError, match=r"header|above the limit of 200") as raised:
        far.receive(200, 5.0)
    assert raised.value.errno is not None


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(where: Path | str):
    with listening(where, most_bytes=100) as place:
        client = place.client()
        with pytest.raises(UsageError, match=r"worker 0: tensors of 104 bytes for server 0.*100"):
            client.call("echo", [torch.zeros(26)])
        client.call("echo", [torch.zeros(25)])


# ---------------------------------------------------------------------- calls


def test_a_call_that_nobody_has_waited_for_keeps_its_answer(where: Path | str):
    with listening(where) as place:
        client = place.client()
        first = client.start("first", number=1)
        second = client.start("second", number=2)
        assert second().head["number"] == 2
        assert first().head["number"] == 1
        assert first().head["number"] == 1


def test_a_listener_that_never_answers_is_named(where: Path | str):
    done = threading.Event()
    with listening(where, lambda *_: Message({"done": done.wait(30)})) as place:
        client = place.client(timeout_s=0.3)
        with pytest.raises(CollectiveTimeoutError, match=r"worker 0 waited 0\.3 s for server 0"):
            client.call("wait")
        client._timeout_s = 30.0
        with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.3 s"):  # at once: who has given up waits no more
            client.call("wait")
        done.set()
        assert len(place.calls) == 1


def test_nobody_listens(where: Path | str):
    with listening(where) as place:
        client = place.client()
    with pytest.raises(PeerLostError, match=r"worker 0 lost server 0 \(Connection refused\)"):
        client.call("echo")
    with pytest.raises(PeerLostError, match=r"worker 1 lost server 0 \((Connection refused|No such file)"):
        place.client(1)
    client.close()


def test_a_peer_that_says_goodbye_is_not_lost(where: Path | str):
    with listening(where, silent_s=0.2) as place:
        place.client(0).close()
        client = place.client(1)
        client._line.close()
        assert place.has_lost.wait(30)
        time.sleep(0.5)
        assert place.lost == [1]


def test_neither_side_keeps_what_has_come(where: Path | str):
    """Else a server would have a copy of its parameters, and of the gradients, for each worker that computes."""
    kept: list[weakref.ref[Tensor]] = []

    def answer(rank: int, message: Message) -> Message:
        answered = torch.zeros(5)
        kept.extend(map(weakref.ref, [*message.tensors, answered]))
        return Message({}, [answered])

    with listening(where, answer) as place:
        client, pushed = place.client(), torch.zeros(3)
        found = client.call("step", [pushed])
        kept += map(weakref.ref, [pushed, *found.tensors])
        del pushed, found
        wait_until(lambda: all(each() is None for each in kept))
        assert len(kept) == 4
        assert client.call("step").tensors[0].numel() == 5


# ---------------------------------------------------------------------- connections that break


class Adds:
    """A listener's state: what was applied."""

    def __init__(self) -> None:
        self.applied: list[int] = []

    def __call__(self, rank: int, message: Message) -> Message:
        (tensor,) = message.tensors
        assert bool((tensor == message.head["number"]).all())
        self.applied.append(message.head["number"])
        return Message({"count": len(self.applied)}, [tensor * 2])


def check_cuts(limits: Callable[[int], tuple[int | None, int | None]], positions: range) -> None:
    adds = Adds()
    with listening(answer=adds) as place, Cuts(place.listener.address) as proxy:
        client = place.client(address=proxy.address)
        for number, position in enumerate(positions):
            client._line.close()  # the next call is on a connection of its own
            proxy.limits.append(limits(position))
            answer = client.call("add", [torch.full((2,), float(number))], number=number)
            assert answer.head == {"count": number + 1}
            assert answer.tensors[0].tolist() == [2.0 * number] * 2
        client.close()
    assert adds.applied == list(range(len(positions)))
    assert place.lost == []
    assert proxy.num_connections > 1.5 * len(positions), "they were cut"


# A hello has 68 bytes and is answered by 64; a call has 94, its answer 70.
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.extended)])
def test_a_connection_that_is_cut_at_any_byte(every: int):
    """In a call, and in an answer."""
    check_cuts(lambda position: (position, None), range(0, 68 + 90, every))
    check_cuts(lambda position: (None, position), range(0, 64 + 60, every))


def test_an_exception_in_the_middle_of_a_call_breaks_no_other(monkeypatch: pytest.MonkeyPatch):
    """Such as a signal handler's. The call that it has interrupted is sent as a whole before the next."""
    adds = Adds()
    moves = Line._move
    with listening(answer=adds) as place:
        client = place.client()
        for number, at in enumerate(range(1, 6)):
            count = [0]

            def breaks(
                line: Line, act: Any, view: memoryview, patience_s: Any, at: int = at, count: Any = count
            ) -> None:
                count[0] += line is client._line
                if line is client._line and count[0] == at:
                    act(view[:1])
                    raise KeyboardInterrupt
                moves(line, act, view, patience_s)

            monkeypatch.setattr(Line, "_move", breaks)
            with pytest.raises(KeyboardInterrupt):
                client.call("add", [torch.full((2,), 2.0 * number)], number=2 * number)
            monkeypatch.setattr(Line, "_move", moves)
            answer = client.call("add", [torch.full((2,), 2.0 * number + 1)], number=2 * number + 1)
            assert answer.head == {"count": 2 * number + 2}
    assert adds.applied == list(range(10))


# ---------------------------------------------------------------------- strangers


@pytest.mark.extended(beyond=4)
@pytest.mark.parametrize(
    "badge", [OTHER_KEY, ATTEMPT_BEFORE, Badge(b"", BADGE.run), Badge(BADGE.key, "run 1 server 1")]
)
def test_who_has_another_badge_is_refused(where: Path | str, badge: Badge, capfd: pytest.CaptureFixture[str]):
    with listening(where, silent_s=0.5) as place:
        client = place.client()
        with pytest.raises(PeerLostError, match="it refuses this process: is the secret file the same on all nodes"):
            place.client(1, badge=badge)
        assert client.call("echo").head["rank"] == 0
        assert place.calls == [(0, "echo")]
        assert place.lost == []
    said = capfd.readouterr().err
    of_whom = "" if isinstance(where, Path) else f" from {LOOPBACK}"
    assert f"a stranger's connection{of_whom} was refused: wrong key, or another run's or attempt's" in said


def test_who_listens_without_the_key_is_not_believed():
    with socket.create_server((LOOPBACK, 0)) as impostor:

        def pretend() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(32))
                assert len(connection.recv(68, socket.MSG_WAITALL)) == 68
                connection.sendall(bytes(32))
                assert connection.recv(1) == b"", "it isn't sent anything"

        thread = threading.Thread(target=pretend)
        thread.start()
        with listening() as place, pytest.raises(PeerLostError, match="is not server 0 of this run"):
            place.client(address=json.dumps(impostor.getsockname()))
        thread.join()


def test_a_proof_that_was_seen_before_is_worth_nothing(where: Path | str):
    """Nor is the listener's own."""
    with listening(where) as place:
        hello = b""
        for replay in (False, True):
            with place.reached() as stranger:
                theirs = stranger.recv(32, socket.MSG_WAITALL)
                mine = bytes(32)
                if not replay:
                    hello = wire._HELLO.pack(0, mine, BADGE.proof("client", 0, theirs + mine))
                stranger.sendall(hello)
                assert len(stranger.recv(32, socket.MSG_WAITALL)) == (0 if replay else 32)
        with place.reached() as stranger:
            theirs = stranger.recv(32, socket.MSG_WAITALL)
            stranger.sendall(wire._HELLO.pack(0, mine, BADGE.proof("server", 0, theirs + mine)))
            assert stranger.recv(32) == b""


@pytest.mark.extended(beyond=6)
@pytest.mark.parametrize(
    "said", [b"", b"\0", bytes(67), bytes(68), b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 4096], ids=len
)
def test_garbage_and_half_a_hello(where: Path | str, said: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "_HANDSHAKE_S", 0.3)
    with listening(where) as place:
        client = place.client()
        leaving, staying = place.reached(), place.reached()
        with leaving, staying:
            for each in (leaving, staying):
                each.sendall(said)
            leaving.close()
            assert len(staying.recv(32, socket.MSG_WAITALL)) == 32
            assert _rest(staying) == b"", "it is sent away"
        assert client.call("echo").head["rank"] == 0
        assert (place.calls, place.lost) == ([(0, "echo")], [])


def _rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_a_long_path(tmp_path: Path):
    folder = tmp_path.joinpath(*["a folder with a long name"] * 8)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 200
    with listening(folder) as place:
        client = place.client()
        assert client.call("echo").head["rank"] == 0
