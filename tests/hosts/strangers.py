"""Connections of strangers to a parameter server, which it has to refuse.

python -m tests.hosts.strangers ADDRESS PORT --times 100 --silent 1000 --again-s 60 [--secret-file FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evenstep.parameter_servers.wire import _HELLO, Badge

HEADER = json.dumps({"kind": "step", "call": 1, "tensors": [["float32", [2**58]]]}).encode()  # 2**60 bytes
FRAME = struct.pack("!I", len(HEADER)) + HEADER


def hello(badge: Badge, theirs: bytes) -> bytes:
    mine = os.urandom(32)
    return _HELLO.pack(0, mine, badge.proof("client", 0, theirs + mine))


def sayings(secret: bytes) -> dict[str, Callable[[bytes], bytes]]:
    """What a stranger says to a listener's random number, by its name."""
    another, before = Badge(b"another key", "run server 0"), Badge(secret, f"{'0' * 32} server 0")
    return {
        "garbage": lambda _: os.urandom(4096),
        "ones": lambda _: b"\xff" * 4096,
        "half a hello": lambda _: bytes(34),
        "half a frame": lambda _: FRAME[: len(FRAME) // 2],
        "a frame of 2**60 bytes": lambda _: FRAME,
        "a wrong key": lambda theirs: hello(another, theirs),
        "the attempt before": lambda theirs: hello(before, theirs),
        "the attempt before, and a frame": lambda theirs: hello(before, theirs) + FRAME,
    }


def heard(connection: socket.socket) -> bytes:
    try:
        return connection.recv(32, socket.MSG_WAITALL)
    except ConnectionError:
        return b""


def main() -> int:
    """See the top of the file; status 1: one of them was answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--silent", type=int, default=1000)
    parser.add_argument("--again-s", type=float, default=60.0)
    parser.add_argument("--secret-file", type=Path)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.silent + 64,) * 2)
    secret = args.secret_file.read_bytes().strip() if args.secret_file else b""

    def reached() -> socket.socket:
        return socket.create_connection((args.address, args.port), 60)

    answered = 0
    for name, say in sayings(secret).items():
        for _ in range(args.times):
            with reached() as connection:
                try:
                    connection.sendall(say(heard(connection)))
                    if name.startswith("half"):
                        continue  # and has gone
                    answered += heard(connection) != b""
                except ConnectionError:
                    continue
    silent = [reached() for _ in range(args.silent)]
    num_again, end = 0, time.monotonic() + args.again_s
    while time.monotonic() < end:
        silent[num_again % args.silent].close()
        silent[num_again % args.silent] = reached()
        num_again += 1
    for each in silent:
        each.close()
    sys.stdout.write(f"{answered} answered, {num_again} connected again\n")
    return int(answered > 0)


if __name__ == "__main__":
    sys.exit(main())
