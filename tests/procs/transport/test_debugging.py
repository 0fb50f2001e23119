"""torch's means of debugging on ranks of the backend: `TORCH_DISTRIBUTED_DEBUG`, and the server of its handlers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.commands import call

JOINS = """
    import os, sys, time
    import torch, torch.distributed as dist
    import evenstep

    seed = int(sys.argv[2])
    if sys.argv[1] == "init":
        world = evenstep.init()
    else:
        dist.init_process_group("evenstep")
    rank = dist.get_rank()
    tensors = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
"""
CALLS = """
    assert dist.get_debug_level().name == os.environ["TORCH_DISTRIBUTED_DEBUG"]
    total = tensors[rank].clone()
    dist.all_reduce(total)
    assert torch.equal(total, tensors[0] + tensors[1])
    gathered = [torch.empty(50, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(gathered, tensors[rank], group=dist.new_group([0, 1]))
    assert torch.equal(torch.stack(gathered), tensors)
    if rank == 0:
        dist.send(tensors[0], 1)
    else:
        received = torch.empty(50, dtype=torch.float64)
        dist.recv(received, 0)
        assert torch.equal(received, tensors[0])
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]
    for wrapped in (torch.nn.parallel.DistributedDataParallel, evenstep.DistributedDataParallel):
        layer = torch.nn.Linear(50, 1, bias=False, dtype=torch.float64)
        model = wrapped(layer)
        model(tensors[rank]).sum().backward()
        assert torch.equal(layer.weight.grad[0], (tensors[0] + tensors[1]) / 2)
    if rank == 1:
        tensors = tensors[:, :20].contiguous()
    try:
        dist.all_reduce(tensors)
    except evenstep.errors.MismatchError:
        print("they differ")
    else:
        raise AssertionError("no error")
"""
SERVES = """
    import socket, types, urllib.request
    sys.modules.setdefault("tabulate", types.ModuleType("tabulate")).tabulate = None  # of tables that nobody looks at
    from torch.distributed import debug
    from torch.distributed.debug import _frontend as frontend

    class Pings(frontend.DebugHandler):
        def routes(self):
            return [frontend.Route("/pings", self.answer)]

        def nav_links(self):
            return []

        def answer(self, request):
            return repr([each.text for each in frontend.fetch_all("ping", timeout=30)[1]]).encode()

    def fetch(urls, timeout):  # torch's own uses what isn't always installed
        paths = [(url.rpartition(":")[2].partition("/")) for url in urls]
        sent = [urllib.request.Request(f"http://localhost:{port}/{path}", method="POST") for port, _, path in paths]
        return [frontend.Response(200, urllib.request.urlopen(each).read().decode()) for each in sent]

    frontend.fetch_aiohttp = fetch
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    debug.start_debug_server(port=port, handlers=[Pings()])
    dist.barrier()
    if rank == 0:
        for turn in range(1000):
            try:
                print(urllib.request.urlopen(f"http://localhost:{port}/pings").read().decode())
                break
            except urllib.error.URLError:
                time.sleep(0.05)
    dist.barrier()
    if rank == 0:
        debug.stop_debug_server()
"""


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("made_by", ["init", "torch"])
@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_with_torchs_level_of_debugging_calls_are_the_same(
    tmp_path: Path, fresh_seed: int, level: str, made_by: str
) -> None:
    """And what differs between ranks is found, which is what torch wraps its own groups for at DETAIL."""
    arguments = ["--nproc-per-node", "2", "--device", "cpu", "script.py", made_by, str(fresh_seed)]
    script = textwrap.dedent(JOINS) + textwrap.dedent(CALLS)
    code, command = call(tmp_path, arguments, script, fresh=True, TORCH_DISTRIBUTED_DEBUG=level)
    assert (code, command.stdout) == (0, "they differ\n"), command.stderr


@pytest.mark.extended
@pytest.mark.parametrize("made_by", ["init", "torch"])
def test_torchs_debug_server_reaches_all_ranks(tmp_path: Path, fresh_seed: int, made_by: str) -> None:
    """It looked for a store at MASTER_PORT, where nobody listens, for 300 s."""
    arguments = ["--nproc-per-node", "2", "--device", "cpu", "script.py", made_by, str(fresh_seed)]
    code, command = call(tmp_path, arguments, textwrap.dedent(JOINS) + textwrap.dedent(SERVES))
    assert (code, command.stdout) == (0, "['pong', 'pong']\n"), command.stderr
