"""A rank that keeps the others waiting is named by the launchers of all hosts, in a script of torch alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.hosts.conftest import Hosts

PLAIN = """
    import os, time
    import torch, torch.distributed.fsdp
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    model = WRAP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        if step == 10 and dist.get_rank() == 1:
            time.sleep(9)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("wrap", "call"),
    [
        ("torch.nn.parallel.DistributedDataParallel(model)", "backward"),
        ("torch.distributed.fsdp.fully_shard(model, mesh=dist.init_device_mesh('cpu', (2,)))", "forward"),
    ],
    ids=["DistributedDataParallel", "fully_shard"],
)
def test_a_rank_that_others_wait_for_is_named_on_every_host_and_again_when_it_comes(
    wrap: str, call: str, make_hosts: Callable[[int], Hosts]
) -> None:
    hosts = make_hosts(2)
    script = PLAIN.replace("WRAP", wrap)
    started = [hosts.start(host, script, ["--name-after", "2"]) for host in range(2)]
    assert [host.wait() for host in started] == [0, 0], started[0].stderr + started[1].stderr
    for number, host in enumerate(started):
        where = r", on node 1 \([^)]+\)" if number == 0 else ""
        said = host.stderr
        named = rf"evenstep: rank 1 \(pid \d+{where}\) is [^;]* of step 10; rank 0 waits since \d s"
        assert re.search(named, said), said
        assert said.count("is here:") == 1, said
        assert re.search(r"rank 1 is here:\n(.*\n)*? +time\.sleep\(9\)\n", said), said
        assert re.search(rf"rank 0 waits in {call} of step 10, at script.py:14 in <module>: model\(", said), said
        assert re.search(rf"evenstep: rank 1 \(pid \d+{where}\) has come, after (8|9|1\d) s", said), said
