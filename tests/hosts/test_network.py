"""`evenstep bench --network` over hosts: each level by itself."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.hosts.conftest import Hosts

MEASURES = """
    from evenstep.cli import main

    flags = ["--min-size", "4K", "--max-size", "256K", "--repeats", "2", "--collectives", "all_reduce,broadcast"]
    raise SystemExit(main(["bench", "--network", *flags, "--json", "network.json"]))
"""


def test_levels_of_two_hosts_of_two_ranks(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    first, second = (hosts.start(host, MEASURES, ["--nproc-per-node", "2"]) for host in range(2))
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    report = json.loads((first.directory / "network.json").read_text())
    assert report["transport"] == "shared memory + gloo"
    assert report["hosts"] == {"num_hosts": 2, "ranks_per_host": 2}
    seen = {(each["level"], each["collective"], each["num_ranks"]) for each in report["figures"]}
    assert seen == {
        ("all", "all_reduce", 4),
        ("all", "broadcast", 4),
        ("inside", "all_reduce", 2),
        ("between", "all_reduce", 2),
    }
    inside, between = (report["levels"][name] for name in ("inside", "between"))
    assert inside["algorithm"] == between["algorithm"] == "lanes"
    assert inside["link"]["latency_s"] < between["link"]["latency_s"]
    assert not (second.directory / "network.json").exists()
    assert "between hosts: " in first.stdout
    assert second.stdout == ""
