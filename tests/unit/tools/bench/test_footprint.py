"""Memory of a rank: formulas against tensors that exist, `evenstep estimate`."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from evenstep.cli.arguments import size
from evenstep.cli.commands import whole_parser
from evenstep.cli.main import main
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.tools.estimate.footprint import WAYS, Sizes, footprint, footprints, verdict
from evenstep.tools.estimate.probe import (
    largest_unit_bytes,
    sizes_of,
    state_tensors,
    storage_bytes,
)
from evenstep.tools.estimate.probe import main as run_probe
from tests import pages
from tests.live_bytes import LiveBytes

GIB = 1 << 30


def transformer() -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Embedding(1000, 64), *blocks, nn.Linear(64, 1000))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    ("build", "shape", "dtype"),
    [(transformer, (1, 64), torch.long), (transformer, (8, 64), torch.long), (mlp, (16, 256), torch.float32)],
)
def test_an_estimate_is_within_a_tenth_of_what_a_step_takes(
    build: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, kind: type[torch.optim.Optimizer]
) -> None:
    """Of all tensors that are alive at once while a model that exists trains over labels."""
    with FakeTensorMode():
        ghost = torch.zeros(shape, dtype=dtype)
        sizes = sizes_of(build(), lambda p: kind(p, foreach=False, lr=0.1), [ghost])  # type: ignore[call-arg]
    model = build()
    optimizer = kind(model.parameters(), foreach=False, lr=0.1)  # type: ignore[call-arg]
    for _ in range(2):
        with LiveBytes() as live:
            live.add([*model.parameters(), *model.buffers(), *state_tensors(optimizer)])
            live.peak = 0
            logits = model(torch.zeros(shape, dtype=dtype)).flatten(0, -2)
            F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
            optimizer.step()
        del logits
        optimizer.zero_grad()
    assert footprint(sizes, "one rank", 1).total == pytest.approx(live.peak, rel=0.1)
    assert (sizes.fixed_bytes, sizes.num_samples) == (storage_bytes(model.buffers()), shape[0])
    assert sizes.state_bytes == storage_bytes(state_tensors(optimizer))


def specs(*shapes: tuple[int, ...]) -> tuple[ParameterSpec, ...]:
    return tuple(ParameterSpec(str(i), shape, torch.float32, torch.device("meta")) for i, shape in enumerate(shapes))


def test_formulas_by_hand() -> None:
    """Two parameters of 1 MiB and one of 4 bytes, AdamW, on 4 ranks."""
    sizes = Sizes(specs((512, 512), (512, 512), (1,)), 100, 2 * (2 * 1048576 + 4), 5000, 10)
    one, ddp, sharded, second, fsdp = footprints(sizes, [4])
    mib = 1 << 20
    assert (one.parameters, one.gradients, one.optimizer) == (2 * mib + 104, 2 * mib + 4, 4 * mib + 8)
    # The small parameter takes a line of 64 bytes; it comes first, and the next one travels with it.
    assert (ddp.parameters, ddp.gradients, ddp.passing) == (2 * mib + 104, 2 * mib + 64, mib + 64)
    assert sharded.gradients == 2 * mib + 256  # equal shards of whole lines
    assert sharded.parameters == 2 * mib + 256 + 100
    assert sharded.optimizer == pytest.approx(mib, rel=1e-3)
    assert second.gradients == sharded.gradients // 4
    assert second.passing == 3 * (mib + 256)
    assert fsdp.parameters == 2 * 128 * 512 * 4 + 4 + 100
    assert fsdp.optimizer == pytest.approx(mib, rel=1e-3)
    assert fsdp.passing == 3 * (2 * mib + 4)
    # At the end of the backward pass gradients are there, and one of weights that is on its way.
    assert fsdp.total == fsdp.parameters + fsdp.optimizer + fsdp.passing + fsdp.gradients + 5000
    assert {row.activations for row in (one, ddp, sharded, second, fsdp)} == {5000}


def test_what_must_hold_for_any_model(fresh_seed: int) -> None:
    """Dividing more never takes more; what stays on n ranks is at least what one has."""
    draw = random.Random(fresh_seed)
    for _ in range(50):
        shapes = [(draw.randint(1, 300), draw.randint(1, 300)) for _ in range(draw.randint(1, 20))]
        sizes = Sizes(specs(*shapes), draw.randint(0, 1000), 8 * sum(a * b for a, b in shapes), 0)
        n = 2 ** draw.randint(1, 6)
        rows = {row.way: row for row in footprints(sizes, [n])}
        padding = 64 * n * len(shapes)
        assert rows["DDP"].optimizer >= rows["sharded"].optimizer - 8 * padding
        assert rows["sharded"].gradients >= rows["sharded, stage 2"].gradients >= sizes.parameter_bytes // n
        assert n * rows["sharded"].optimizer >= sizes.state_bytes
        assert rows["FSDP2"].parameters * n >= sizes.parameter_bytes
        for row in footprints(sizes, [n]):
            assert row.num_ranks == (1 if row.way == "one rank" else n)


def test_units_of_fsdp() -> None:
    """The items of a list of layers, and what is left."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(3))
    model = nn.Module()
    model.blocks, model.head = blocks, nn.Linear(10, 50)  # type: ignore[assignment]
    assert largest_unit_bytes(model) == 4 * 550
    assert largest_unit_bytes(nn.Linear(10, 10)) == 440


# ---------------------------------------------------------------------- what it says

SMALL = Sizes(specs((1024, 1024)), 0, 8 << 20, 64 << 20, 32)


def said(sizes: Sizes, ranks: int, memory: int) -> str:
    return " ".join(verdict(sizes, ranks, memory))


def test_each_way_is_the_next_one_when_the_one_before_does_not_fit() -> None:
    billion = Sizes(specs(*[(4096, 4096)] * 60), 0, 8 * 60 * 4096 * 4096, 0, largest_unit_bytes=4 * 4096 * 4096)
    totals = {way: footprint(billion, way, 8).total for way in WAYS}
    ways = ["DDP", "sharded", "sharded, stage 2", "FSDP2"]
    assert sorted(ways, key=lambda way: -totals[way]) == ways  # type: ignore[index]
    assert "DDP is enough" in said(billion, 8, totals["DDP"])
    for way, name, lines in [
        ("sharded", "sharded", "evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=...)"),
        ("sharded, stage 2", "sharded, stage 2", "torch.optim.AdamW, lr=..., shard_gradients=True)"),
        ("FSDP2", "FSDP2", 'mesh={"shard": -1}) as world:         model = evenstep.parallelize(model, world)'),
    ]:
        told = said(billion, 8, totals[way])  # type: ignore[index]
        assert f"{name} is enough: it needs {totals[way] / GIB:,.2f} GiB of" in told  # type: ignore[index]
        assert lines in told
    least = min(row.total for row in footprints(billion, [8]))
    assert "FSDP2 is enough from 16 ranks on" in said(billion, 8, least - 1)


def test_activations_are_divided_by_no_way() -> None:
    told = said(SMALL, 8, 40 << 20)
    assert "torch.utils.checkpoint" in told


def test_a_layer_that_does_not_fit() -> None:
    assert "or between them" in said(Sizes(specs((65536, 65536)), 0, 8 * 65536**2), 8, GIB)


# ---------------------------------------------------------------------- the commands

BUILD = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.zeros(32, 64)

def build_model():
    return build()[0]

def fail():
    raise RuntimeError("no such data set")
"""


@pytest.fixture
def built(tmp_path: Path) -> str:
    (tmp_path / "build.py").write_text(BUILD)
    return str(tmp_path / "build.py")


def test_estimate(built: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    arguments = ["--ranks", "2,8", "--memory", "1M", "--batch", "64", "--json", str(out)]
    assert main(["estimate", *arguments, f"{built}:build"]) == 0
    text = capsys.readouterr().out
    assert f"{64 * 256 + 256 + 2560 + 10:,} trained parameters, 64 samples a rank" in text
    assert "2 ranks: DDP is enough" in text
    report = json.loads(out.read_text())
    named = [(row["way"], row["num_ranks"]) for row in report["rows"]]
    assert {way for way, count in named if count == 2} == set(WAYS) - {"one rank"}
    assert {way for way, count in named if count == 8} == set(WAYS) - {"one rank"}
    assert report["memory_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["no_such"], "write FILE.py:FUNCTION", 78),
        (["{}:build", "--epochs", "1"], "takes no arguments: --epochs 1", 78),
        (["/proc/self/status:build"], "/proc/self/status is no python file. Write FILE.py:FUNCTION.", 78),
        (["{}:nothing"], "has no function 'nothing'", 78),
        (["{}:fail"], "RuntimeError: no such data set", 2),
        (["--batch", "4", "{}:build_model"], "--batch 4: ", 78),
        (["--json", "/proc/no/such", "{}:build"], "--json /proc/no/such", 78),
    ],
)
def test_estimates_that_make_no_sense(
    built: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, status: int
) -> None:
    assert main(["estimate", *(each.format(built) for each in arguments)]) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("evenstep: ")


SCRIPT = """
import torch, evenstep

with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256,
        10))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1000):
        model.backward(model(torch.randn(32, 64)).square().mean(), weight=32)
        optimizer.step()
        optimizer.zero_grad()
        assert step < 3
"""


@pytest.mark.extended
def test_memory_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends after three steps; what is counted is what the same model has on "meta"."""
    (tmp_path / "train.py").write_text(SCRIPT)
    out = tmp_path / "memory.json"
    assert main(["estimate", "--ranks", "2", "--json", str(out), str(tmp_path / "train.py")]) == 0
    text = capsys.readouterr().out
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
        expected = sizes_of(model, lambda p: torch.optim.AdamW(p, foreach=False), [torch.zeros(32, 64)])
    row = json.loads(out.read_text())["rows"][0]
    assert row["optimizer"] == expected.state_bytes
    assert row["parameters"] == expected.parameter_bytes + expected.fixed_bytes
    assert row["activations"] == pytest.approx(expected.activation_bytes, rel=0.02)
    assert "for 32 samples" in text
    assert "2 ranks: DDP is enough" in text


TWO_OPTIMIZERS = """
import torch, evenstep

with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel(torch.nn.Linear(64, 256))
    other = torch.nn.Linear(256, 8)
    one = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    two = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(1000):
        other(model(torch.randn(32, 64))).square().mean().backward()
        for each in (one, two):
            each.step()
        for each in (one, two):
            each.zero_grad()
        assert step < 3
"""


def test_several_optimizers_and_one_inside_another(tmp_path: Path) -> None:
    """A ShardedOptimizer steps flat memory through an optimizer of its own: nothing counts twice."""
    script, out = tmp_path / "train.py", tmp_path / "memory.json"
    script.write_text(TWO_OPTIMIZERS)
    path, arguments, before = list(sys.path), list(sys.argv), sys.modules["__main__"]
    try:
        with pytest.raises(SystemExit) as caught:
            run_probe(str(out), str(script), [])
    finally:
        sys.path[:], sys.argv[:], sys.modules["__main__"] = path, arguments, before
    assert not caught.value.code
    told = json.loads(out.read_text())
    assert sorted(shape for shape, _ in told["parameters"]) == [[8], [8, 256], [256], [256, 64]]
    adamw, momentum = 2 * 4 * (64 * 256 + 256), 4 * (256 * 8 + 8)
    assert told["state_bytes"] == pytest.approx(adamw + momentum, rel=0.01)
    assert told["num_samples"] == 32


def test_sizes() -> None:
    assert [size(text) for text in ("4096", "64K", "16M", "1G", "2MiB", "3kb", "5GB", "1 TiB")] == [
        4096, 65536, 1 << 24, 1 << 30, 2 << 20, 3000, 5 * 10**9, 1 << 40,
    ]  # fmt: skip
    for wrong in ("0G", "G", "-1", "1.5G", "5X", "5iB", "²", "٣MB"):
        with pytest.raises(ArgumentTypeError, match="is no size"):
            size(wrong)


def test_commands_of_the_page_are_commands() -> None:
    """Every `evenstep` command of the page is one that its parser takes."""
    commands = re.findall(r"^evenstep (\w+) (.*)$", pages.text("how-to/memory.md"), re.MULTILINE)
    assert [command for command, _ in commands] == ["estimate", "estimate"]
    for command, rest in commands:
        whole_parser().parse_args([command, *shlex.split(rest)])
