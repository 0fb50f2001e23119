from __future__ import annotations

import os
import socket

from evenstep.ground.host.network import is_taken, listening_inodes, owner_of

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:72E5 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 41234 1 0 100 0 0 10 0
   1: 0100007F:72E5 0100007F:8888 01 00000000:00000000 00:00000000 00000000     0        0 41235 1 0 100 0 0 10 0
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 41236 1 0 100 0 0 10 0
"""


def test_only_listeners_on_the_port_count() -> None:
    assert listening_inodes(TABLE, 0x72E5) == {"41234"}
    assert listening_inodes(TABLE, 1) == set()


def test_a_listener_is_found_and_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert is_taken("127.0.0.1", port)
        assert f"pid {os.getpid()}" in owner_of(port)
    assert not is_taken("127.0.0.1", port)


def test_addresses_of_other_hosts_are_not_ours_to_judge() -> None:
    assert not is_taken("192.0.2.1", 29500)
    assert not is_taken("no-such-host.invalid", 29500)
