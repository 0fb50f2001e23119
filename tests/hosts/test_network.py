"""Networks of hosts: measured level by level, and taken down with whoever made them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from tests import namespaces
from tests.hosts.conftest import Hosts

MEASURES = """
    from evenstep.cli.main import main

    flags = ["--min-size", "4K", "--max-size", "256K", "--repeats", "2", "--collectives", "all_reduce,broadcast"]
    raise SystemExit(main(["bench", "network", *flags, "--json", "network.json"]))
"""


def test_levels_of_two_hosts_of_two_ranks(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    first, second = (hosts.start(host, MEASURES, ["--nproc-per-node", "2"]) for host in range(2))
    assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    report = json.loads((first.directory / "network.json").read_text())
    assert report["transport"] == "shared memory + gloo"
    assert report["topology"] == {"num_nodes": 2, "ranks_per_node": 2}
    seen = {(each["level"], each["collective"], each["num_ranks"]) for each in report["figures"]}
    assert seen == {
        ("all", "all_reduce", 4),
        ("all", "broadcast", 4),
        ("intra_node", "all_reduce", 2),
        ("inter_node", "all_reduce", 2),
    }
    intra_node, inter_node = (report["levels"][name] for name in ("intra_node", "inter_node"))
    assert intra_node["algorithm"] == inter_node["algorithm"] == "hierarchical"
    assert intra_node["link"]["latency_s"] < inter_node["link"]["latency_s"]
    assert not (second.directory / "network.json").exists()
    assert "between nodes: " in first.stdout
    assert second.stdout == ""


MAKES_NAMESPACES = """
    import time
    from tests.namespaces import Namespaces

    with Namespaces(1) as hosts:
        print(hosts._prefix, flush=True)
        for _ in range(600):  # a signal that comes just before a sleep is handled after it
            time.sleep(0.1)
"""


@pytest.mark.brief
@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_namespaces_are_gone_with_their_process_or_with_the_next(ends_by: signal.Signals) -> None:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    program = [sys.executable, "-c", textwrap.dedent(MAKES_NAMESPACES)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        prefix = process.stdout.readline().strip()
        assert prefix
        process.send_signal(ends_by)
        assert process.wait(30) == -ends_by
    left = {f"{prefix}-0", f"{prefix}-switch"} if ends_by == signal.SIGKILL else set()
    assert set(namespaces.sweep()) & {f"{prefix}-0", f"{prefix}-switch"} == left
    assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
