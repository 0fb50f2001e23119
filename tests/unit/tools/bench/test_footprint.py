"""Memory of a rank: formulas against tensors that exist, `evenstep estimate`."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from evenstep.cli.arguments import size
from evenstep.cli.commands import whole_parser
from evenstep.cli.main import main
from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.layout import ParameterSpec
from evenstep.tools.estimate.footprint import WAYS, Sizes, footprint, footprints, verdict
from evenstep.tools.estimate.probe import (
    MadeBytes,
    largest_unit_bytes,
    sizes_of,
    specs_of,
    state_tensors,
    storage_bytes,
)
from evenstep.tools.estimate.probe import main as run_probe
from tests import pages
from tests.live_bytes import LiveBytes

GIB = 1 << 30


def random_mlp(draw: random.Random) -> nn.Sequential:
    widths = [draw.randint(1, 200) for _ in range(draw.randint(2, 6))]
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.GELU()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_sizes_of_fake_tensors_are_those_of_real_ones(
    kind: type[torch.optim.Optimizer], settings: dict[str, object], fresh_seed: int
) -> None:
    """Parameters, buffers, optimizer state and activations of a model that was allocated and trained."""
    draw = random.Random(fresh_seed)
    for _ in range(5):
        state = draw.getstate()
        real = random_mlp(draw)
        draw.setstate(state)
        mode = FakeTensorMode()
        with mode:
            ghost = random_mlp(draw)
        batch = draw.randint(2, 40)
        real[0].weight.requires_grad_(False)
        ghost[0].weight.requires_grad_(False)
        width = real[0].in_features
        with mode:
            found = sizes_of(ghost, lambda p: kind(p, foreach=False, **settings), [torch.zeros(batch, width)])

        trained = [p for p in real.parameters() if p.requires_grad]
        optimizer = kind(trained, foreach=False, **settings)
        x = torch.randn(batch, width)
        with MadeBytes(real.parameters()) as made:
            logits = real(x)
            logits.log_softmax(-1).mean().backward()
        held = made.peak + storage_bytes([x])
        optimizer.step()
        with MadeBytes([]) as made:
            optimizer.step()
        assert found.parameter_bytes == storage_bytes(trained)
        assert found.state_bytes == storage_bytes(state_tensors(optimizer))
        assert found.stepping_bytes == pytest.approx(made.peak, abs=64)
        assert found.fixed_bytes == storage_bytes([real[0].weight, *real.buffers()])
        assert found.num_samples == batch
        assert found.activation_bytes == pytest.approx(held, rel=0.01, abs=64)


def test_what_operations_make_counts_once_and_for_as_long_as_it_lives() -> None:
    x = torch.randn(100, requires_grad=True)
    with MadeBytes([x]) as made:
        y = x * 1.0
        z = y * y + y.view(10, 10).t().sum()
        assert made.peak == 4 * (2 * 100 + 1 + 100), "y, its square, a sum, and the result"
        made.restart()
        del y  # autograd has it still
        z.sum().backward()
        assert x.grad is not None
        del z
        made.restart()
        w = x.grad.clone()
        x.grad.add_(w)  # gradients are counted apart, and what is written to is there already
        assert made.peak == 400
    w.exp()
    assert made.peak == 400


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return hidden


class GPT(nn.Module):
    """Blocks, and more words than anything else."""

    def __init__(self, *, is_autocast: bool = False) -> None:
        super().__init__()
        self.is_autocast = is_autocast
        self.words = nn.Embedding(1000, 64)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(3)), nn.LayerNorm(64), nn.Linear(64, 1000))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
            logits: torch.Tensor = self.blocks(self.words(words))
        return logits.float()


class ResNet(nn.Module):
    """Convolutions with batch normalisation, around which there is a way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 100)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "GPT, one sample": (GPT, (1, 64), torch.long),
    "GPT": (GPT, (8, 64), torch.long),
    "GPT, autocast": (lambda: GPT(is_autocast=True), (8, 64), torch.long),
    "ResNet": (ResNet, (4, 3, 32, 32), torch.float32),
    "MLP": (lambda: nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)), (16, 256), torch.float32),
}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_is_within_a_tenth_of_what_a_step_takes(name: str, kind: type[torch.optim.Optimizer]) -> None:
    """Of all tensors that are alive at once while a model that exists trains over labels."""
    build, shape, dtype = MODELS[name]
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


def test_one_rank_divides_nothing() -> None:
    sizes = Sizes(specs((10, 10)), 0, 800)
    assert {footprint(sizes, way, 1).total for way in WAYS} == {400 + 400 + 800}
    busy = replace(sizes, activation_bytes=500, stepping_bytes=50)
    assert footprint(busy, "one rank", 1).total == 400 + 800 + 500, "activations go while gradients come"
    assert footprint(replace(busy, stepping_bytes=200), "one rank", 1).total == 400 + 800 + 400 + 200


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


def test_enough() -> None:
    assert "DDP is enough" in said(SMALL, 8, GIB)
    assert "one rank is enough" in said(SMALL, 1, GIB)


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

def build_nothing():
    return 3

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


def test_estimate_without_inputs(built: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{built}:build_model"]) == 0
    assert "Activations aren't counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["no_such"], "write FILE.py:FUNCTION", 78),
        (["{}:build", "--epochs", "1"], "takes no arguments: --epochs 1", 78),
        (["--optimizer", "x", "{}:build"], "argument --optimizer: invalid choice: 'x'", 78),
        (["no_such.py:build"], "no_such.py: no such script", 78),
        (["no_such_module:build"], "no_such_module can't be imported", 2),
        (["/proc/self/status:build"], "/proc/self/status is no python file. Write FILE.py:FUNCTION.", 78),
        (["{}:nothing"], "has no function 'nothing'", 78),
        (["{}:build_nothing"], "returns int, and no torch.nn.Module", 78),
        (["{}:fail"], "RuntimeError: no such data set", 2),
        (["--ranks", "0", "{}:build"], "argument --ranks: '0' is less than 1", 78),
        (["--memory", "lots", "{}:build"], "'lots' is no size", 78),
        (["--batch", "0", "{}:build"], "argument --batch: '0' is less than 1", 78),
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


def test_a_script_that_trains_when_it_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(2).sum().item()\n")
    assert main(["estimate", f"{script}:build"]) == 2
    assert "put what trains under `if __name__ ==" in capsys.readouterr().err


def test_a_file_with_a_data_class_whose_annotations_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n\n@dataclass\nclass C:\n"
    )
    (tmp_path / "model.py").write_text(
        f"{text}    width: int = 8\n\ndef build():\n    return torch.nn.Linear(C().width, 2)\n"
    )
    assert main(["estimate", f"{tmp_path}/model.py:build"]) == 0
    assert "18 trained parameters" in capsys.readouterr().out


def test_a_model_that_cannot_run_on_meta() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.sum().item()

    with torch.device("meta"), pytest.raises(UsageError, match="model can't run on tensors that have no values"):
        sizes_of(Reads(4, 4), lambda p: torch.optim.SGD(p, lr=0.1), [torch.zeros(2, 4)])


def test_an_optimizer_that_cannot_step_on_meta() -> None:
    with pytest.raises(UsageError, match="optimizer can't step tensors that have no values"):
        sizes_of(nn.Linear(4, 4, device="meta"), lambda p: torch.optim.Adafactor(p, foreach=False))


def test_a_model_without_trained_parameters() -> None:
    with pytest.raises(UsageError, match="no parameter that is trained"):
        sizes_of(nn.ReLU(), lambda p: torch.optim.SGD(p, lr=0.1))


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


def test_what_the_optimizer_needs_is_counted_apart_from_the_passes(tmp_path: Path) -> None:
    """SGD steps in place: the activations of the passes before it, 64 times as large as the model, are none of it."""
    path, arguments, before = list(sys.path), list(sys.argv), sys.modules["__main__"]
    script, out = tmp_path / "train.py", tmp_path / "memory.json"
    script.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)\nfor _ in range(9):\n"
        "    model(torch.randn(4096, 8)).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    try:
        with pytest.raises(SystemExit):
            run_probe(str(out), str(script), [])
    finally:
        sys.path[:], sys.argv[:], sys.modules["__main__"] = path, arguments, before
    told = json.loads(out.read_text())
    assert told["activation_bytes"] > 4 * 4096 * 8
    assert told["stepping_bytes"] < 4096


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


@pytest.mark.extended
def test_memory_of_scripts_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "no_such.py"]) == 78
    assert "no_such.py: no such script" in capsys.readouterr().err
    for text, message in (("1 / 0", "failed with status 1"), ("print()", "ended before its third optimizer step")):
        (tmp_path / "train.py").write_text(text)
        assert main(["estimate", str(tmp_path / "train.py")]) == 2
        assert message in capsys.readouterr().err


def test_specs_of_a_model() -> None:
    assert [(spec.name, spec.shape) for spec in specs_of(nn.Linear(3, 2).named_parameters())] == [
        ("weight", (2, 3)),
        ("bias", (2,)),
    ]


def test_sizes() -> None:
    assert [size(text) for text in ("4096", "64K", "16M", "1G", "2MiB", "3kb", "5GB", "1 TiB")] == [
        4096, 65536, 1 << 24, 1 << 30, 2 << 20, 3000, 5 * 10**9, 1 << 40,
    ]  # fmt: skip
    for wrong in ("0G", "G", "-1", "1.5G", "5X", "5iB", "²", "٣MB"):
        with pytest.raises(ArgumentTypeError, match="is no size"):
            size(wrong)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: evenstep estimate")
    assert "FILE.py:FUNCTION" in text


def test_commands_of_the_page_are_commands() -> None:
    """Every `evenstep` command of the page is one that its parser takes."""
    commands = re.findall(r"^evenstep (\w+) (.*)$", pages.text("how-to/memory.md"), re.MULTILINE)
    assert [command for command, _ in commands] == ["estimate", "estimate"]
    for command, rest in commands:
        whole_parser().parse_args([command, *shlex.split(rest)])
