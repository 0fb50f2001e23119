"""`evenstep bench --network`, `--predict` and `--published` as far as they need no ranks."""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.bench import network
from evenstep.bench.cost import Hosts, Link, Network, collective_s
from evenstep.bench.memory import add_estimate_arguments
from evenstep.bench.modes import MODES, parser_of
from evenstep.bench.network import (
    Figure,
    Level,
    NetworkReport,
    Sweep,
    _fit,
    join_levels,
    levels_from_json,
    parse_size,
    plan_sizes,
    table,
)
from evenstep.bench.published import by_cycle, by_size, cases, published_table, ready_times, resnet, vgg16
from evenstep.bench.simulate import Bucket, Profile
from evenstep.cli import main
from evenstep.errors import ConfigurationError
from evenstep.transport.local import LocalTransport

DOCS = Path(__file__).parents[2] / "docs"


def figures(level: str, hosts: Hosts, network: Network) -> list[Figure]:
    sizes = plan_sizes("1K", "64M")
    times = [collective_s("all_reduce", size, hosts, network) for size in sizes]
    return [Figure(level, "all_reduce", size, hosts.num_ranks, (t, t, t)) for size, t in zip(sizes, times, strict=True)]


# ---------------------------------------------------------------------- --network


def test_levels_are_fitted_by_what_connects_them() -> None:
    """Two hosts of two ranks: memory inside, Gloo's ring between, whatever the whole takes."""
    made_of = Network(Link(20e-6, 8e9), Link(300e-6, 1e9), "lanes")
    measured = [
        *figures("all", Hosts(2, 2), made_of),
        *figures("inside", Hosts(1, 2), made_of),
        *figures("between", Hosts(2, 1), made_of),
    ]
    levels = _fit(measured, Hosts(2, 2), "shared memory + gloo")
    for name, link in (("inside", made_of.inside), ("between", made_of.between)):
        assert levels[name].link.latency_s == pytest.approx(link.latency_s, rel=1e-3)
        assert levels[name].link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
    assert join_levels(levels).algorithm == "lanes"


@pytest.mark.parametrize(
    ("hosts", "transport", "name", "algorithm"),
    [
        (Hosts(1, 4), "shared memory", "inside", "lanes"),
        (Hosts(4, 1), "gloo", "between", "ring"),
        (Hosts(1, 8), "nccl", "inside", "ring"),
    ],
)
def test_one_level(hosts: Hosts, transport: str, name: str, algorithm: str) -> None:
    made_of = Network(Link(20e-6, 8e9), Link(300e-6, 1e9), algorithm)  # type: ignore[arg-type]
    levels = _fit(figures("all", hosts, made_of), hosts, transport)
    assert list(levels) == [name]
    assert levels[name].link.bytes_per_s == pytest.approx(getattr(made_of, name).bytes_per_s, rel=1e-3)
    assert levels[name].link.latency_s == pytest.approx(getattr(made_of, name).latency_s, rel=1e-3)


def test_a_report_survives_a_file_and_has_a_line_per_figure() -> None:
    made_of = Network(Link(20e-6, 8e9), Link(20e-6, 8e9), "ring")
    measured = tuple(figures("all", Hosts(4, 1), made_of))
    report = NetworkReport("gloo", Hosts(4, 1), measured, _fit(measured, Hosts(4, 1), "gloo"))
    read = json.loads(json.dumps(report.to_json()))
    assert levels_from_json(read, where="x") == report.levels
    last = read["figures"][-1]
    assert last["algorithm_bytes_per_s"] == pytest.approx(last["num_bytes"] / last["seconds"][1])
    assert last["bus_bytes_per_s"] == pytest.approx(1.5 * last["algorithm_bytes_per_s"])
    lines = table(report).splitlines()
    assert len([line for line in lines if line.startswith("| all (4)")]) == len(measured)
    assert lines[-1].startswith("between hosts: 20.0 us, 8.000 GB/s (ring")
    (level,) = report.levels.values()
    noisy = table(replace(report, levels={"between": replace(level, error=0.8)}))
    assert noisy.endswith("The fit is poor: measure again when hosts and network are quiet, with more --repeats.")


class Done:
    def wait(self) -> None:
        """At once."""

    def is_completed(self) -> bool:
        return True


class Shaped:
    """A wire of 1,000 bytes a second that lets 500 through at once after a pause, and its clock."""

    def __init__(self) -> None:
        self.now, self.free_bytes = 0.0, 0

    def barrier(self) -> Done:
        self.free_bytes = 500
        return Done()

    def send(self, num_bytes: int) -> Done:
        self.now += max(0, num_bytes - self.free_bytes) / 1000
        self.free_bytes = max(0, self.free_bytes - num_bytes)
        return Done()


@pytest.mark.parametrize(("num_bytes", "count"), [(100, 5), (1000, 1)])
def test_what_a_wire_takes_for_free_after_a_pause_is_not_measured(
    num_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Shaped()
    world: Any = SimpleNamespace(transport=wire, control=LocalTransport(), device=torch.device("cpu"))
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: wire.now))
    took = network._time(world, lambda: wire.send(num_bytes), count)
    assert took == pytest.approx(num_bytes / 1000)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "64K", "16M", "1G", "2MiB", "3kb")] == [
        4096, 65536, 1 << 24, 1 << 30, 2 << 20, 3072,
    ]  # fmt: skip
    assert plan_sizes("1K", "64K") == (1024, 4096, 16384, 65536)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-size", "many"], "'many' is no size"),
        (["--min-size", "0"], "'0' is no size"),
        (["--min-size", "2M", "--max-size", "1M"], "--min-size 2M is more than --max-size 1M"),
        (["--collectives", "all_reduce,gossip"], "--collectives gossip"),
        (["--repeats", "0"], "--repeats 0"),
        (["--nproc-per-node", "1"], "--nproc-per-node 1: a network has at least two ranks"),
    ],
)
def test_flags_that_make_no_sense(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["bench", "--network", *flags]) == 78
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "levels", [None, [], {"inside": 5}, {"inside": {"link": {"latency_s": 1.0}}}, {"inside": {"link": {"gbit": 1.0}}}]
)
def test_links_that_are_damaged(levels: object) -> None:
    with pytest.raises(ConfigurationError, match=r"links\.json is damaged"):
        levels_from_json({"kind": "network", "version": 1, "levels": levels}, where="links.json")


def test_nothing_measured() -> None:
    with pytest.raises(ConfigurationError, match="at least two ranks"):
        join_levels({})
    with pytest.raises(ConfigurationError, match="sizes of"):
        Sweep(())


# ---------------------------------------------------------------------- --predict

PROFILE = Profile(32, 0.01, 0.02, 0.004, (Bucket(1 << 20, 0.005), Bucket(25 << 20, 0.02)), spread_s=0.001)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE.to_json()))
    return str(tmp_path / "profile.json")


def test_a_prediction(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "prediction.json"
    links = ["--inside", "3,1200", "--between", "10,100"]
    assert main(["bench", "--predict", *links, "--json", str(out), profile]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("32 samples a rank: forward 10.0 ms, backward 20.0 ms")
    assert len([line for line in lines if line.startswith("| all-reduce |")]) == 8
    assert any("| 1,024 | 128 |" in line for line in lines)
    read = json.loads(out.read_text())
    assert len(read) == 3 * 8
    assert all(0 < each["efficiency"] <= 1.3 for each in read)


def test_a_prediction_from_measured_links(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = NetworkReport("nccl", Hosts(1, 8), (), {"inside": Level(Link(1e-6, 1e11), "nccl", 0.1)})
    links = tmp_path / "links.json"
    links.write_text(json.dumps(report.to_json()))
    within = tmp_path / "report.json"
    within.write_text(json.dumps({"profile": PROFILE.to_json()}))
    arguments = ["--links", str(links), "--between", "10,100", "--ranks", "8,64", "--global-batch", "512"]
    assert main(["bench", "--predict", *arguments, str(within)]) == 0
    assert capsys.readouterr().out.count("| sharded |") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}"], "needs a network"),
        (["--inside", "5", "{}"], "--inside 5: write microseconds and Gbit/s"),
        (["--inside", "5,0", "{}"], "--inside 5,0: a link's bandwidth"),
        (["--inside", "5,100", "--ranks", "8,x", "{}"], "--ranks 8,x"),
        (["--inside", "5,100", "--ranks", "12", "{}"], "12 ranks don't fill hosts of 8"),
        (["--inside", "5,100", "--batch", "0", "{}"], "--batch 0.0"),
        (["--inside", "5,100", "--batch", "8", "--global-batch", "8", "{}"], "exclude each other"),
        (["--inside", "5,100", "no_such.json"], "no_such.json: No such file"),
        (["--links", "{}", "{}"], "is no report of `evenstep bench --network --json`"),
        (["--inside", "5,100", __file__], "is no JSON"),
        (["--inside", "5,100", "--json", "/proc/no/such", "{}"], "--json /proc/no/such"),
    ],
)
def test_predictions_that_make_no_sense(
    profile: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "--predict", *(each.format(profile) for each in arguments)]) == 78
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_of_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--network"], ["--predict"], ["--memory"], ["--published"]):
        with pytest.raises(SystemExit) as caught:
            main(["bench", *arguments, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: evenstep bench {arguments[0]}")
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    assert "FILE.py:FUNCTION" in capsys.readouterr().out


# ---------------------------------------------------------------------- --published


def test_models_have_the_sizes_of_their_papers() -> None:
    """Parameters exactly; multiplications of a forward pass over 224 x 224 pixels."""
    found = {
        name: resnet(depths) for name, depths in {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}.items()
    }
    found[16] = vgg16()
    numel = {name: sum(layer.numel for layer in layers) for name, layers in found.items()}
    assert numel == {50: 25_557_032, 101: 44_549_160, 152: 60_192_808, 16: 138_357_544}
    operations = {name: round(sum(layer.operations for layer in layers) / 1e9, 1) for name, layers in found.items()}
    assert operations == {50: 4.1, 101: 7.8, 152: 11.5, 16: 15.5}


def test_fusion_loses_nothing() -> None:
    ready = list(ready_times(resnet((3, 4, 6, 3)), 0.1))
    for fuse in (by_size, by_cycle):
        buckets = fuse(ready)
        assert sum(bucket.num_bytes for bucket in buckets) == 4 * 25_557_032
        assert [bucket.ready_s for bucket in buckets] == sorted(bucket.ready_s for bucket in buckets)
    assert all(bucket.num_bytes <= 64 << 20 for bucket in by_cycle(ready))


def test_the_table_in_the_documentation_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--published"]) == 0
    printed = capsys.readouterr().out
    assert printed == published_table() + "\n"
    assert printed in (DOCS / "scaling.md").read_text()


def test_cases_are_named_once_and_simulated_within_reason() -> None:
    rows = [(case.source, case.model) for case in cases()]
    assert len(set(rows)) == len(rows) == 5
    assert all(0.3 < case.efficiency() <= 1.0 for case in cases())


def test_commands_of_the_page_are_commands() -> None:
    """Every `evenstep` command of the page is one that its parser takes."""
    commands = re.findall(r"^evenstep (bench|estimate) (.*)$", (DOCS / "scaling.md").read_text(), re.MULTILINE)
    seen = set()
    for command, rest in commands:
        arguments = shlex.split(rest)
        if command == "estimate":
            parser = ArgumentParser()
            add_estimate_arguments(parser)
            seen.add(command)
        else:
            seen.add(flag := arguments.pop(0))
            parser = parser_of(flag)
        parser.parse_args(arguments)
    assert seen == {"estimate", *MODES}
