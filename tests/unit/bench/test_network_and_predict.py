"""`evenstep bench network` and `bench predict` as far as they need no ranks."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.bench.predict import network
from evenstep.bench.predict.arguments import parse_size
from evenstep.bench.predict.cost import Link, Network, Topology, collective_s
from evenstep.bench.predict.network import (
    Figure,
    Level,
    NetworkReport,
    Sweep,
    _fit,
    join_levels,
    levels_from_json,
    plan_sizes,
    table,
)
from evenstep.bench.predict.simulate import Bucket, Profile
from evenstep.cli.commands import whole_parser
from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.transport.local import LocalTransport
from tests import pages


def figures(level: str, topology: Topology, network: Network) -> list[Figure]:
    sizes = plan_sizes("1K", "64M")
    times = [collective_s("all_reduce", size, topology, network) for size in sizes]
    return [
        Figure(level, "all_reduce", size, topology.num_ranks, (t, t, t)) for size, t in zip(sizes, times, strict=True)
    ]


# ---------------------------------------------------------------------- --network


def test_levels_are_fitted_by_what_connects_them() -> None:
    """Two nodes of two ranks: memory inside, Gloo's ring between, whatever the whole takes."""
    made_of = Network(Link(20e-6, 8e9), Link(300e-6, 1e9), "hierarchical")
    measured = [
        *figures("all", Topology(2, 2), made_of),
        *figures("intra_node", Topology(1, 2), made_of),
        *figures("inter_node", Topology(2, 1), made_of),
    ]
    levels = _fit(measured, Topology(2, 2), "shared memory + gloo")
    for name, link in (("intra_node", made_of.intra_node), ("inter_node", made_of.inter_node)):
        assert levels[name].link.latency_s == pytest.approx(link.latency_s, rel=1e-3)
        assert levels[name].link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
    assert join_levels(levels).algorithm == "hierarchical"


@pytest.mark.parametrize(
    ("topology", "transport", "name", "algorithm"),
    [
        (Topology(1, 4), "shared memory", "intra_node", "hierarchical"),
        (Topology(4, 1), "gloo", "inter_node", "ring"),
        (Topology(1, 8), "nccl", "intra_node", "ring"),
    ],
)
def test_one_level(topology: Topology, transport: str, name: str, algorithm: str) -> None:
    made_of = Network(Link(20e-6, 8e9), Link(300e-6, 1e9), algorithm)  # type: ignore[arg-type]
    levels = _fit(figures("all", topology, made_of), topology, transport)
    assert list(levels) == [name]
    assert levels[name].link.bytes_per_s == pytest.approx(getattr(made_of, name).bytes_per_s, rel=1e-3)
    assert levels[name].link.latency_s == pytest.approx(getattr(made_of, name).latency_s, rel=1e-3)


def test_a_report_survives_a_file_and_has_a_line_per_figure() -> None:
    made_of = Network(Link(20e-6, 8e9), Link(20e-6, 8e9), "ring")
    measured = tuple(figures("all", Topology(4, 1), made_of))
    report = NetworkReport("gloo", Topology(4, 1), measured, _fit(measured, Topology(4, 1), "gloo"))
    read = json.loads(json.dumps(report.to_json()))
    assert levels_from_json(read, where="x") == report.levels
    last = read["figures"][-1]
    assert last["algorithm_bytes_per_s"] == pytest.approx(last["num_bytes"] / last["seconds"][1])
    assert last["bus_bytes_per_s"] == pytest.approx(1.5 * last["algorithm_bytes_per_s"])
    lines = table(report).splitlines()
    assert len([line for line in lines if line.startswith("| all (4)")]) == len(measured)
    assert lines[-1].startswith("between nodes: 20.0 us, 8.000 GB/s (ring")
    (level,) = report.levels.values()
    noisy = table(replace(report, levels={"inter_node": replace(level, error=0.8)}))
    assert noisy.endswith("The fit is poor: measure again when nodes and network are quiet, with more --repeats.")


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
    assert main(["bench", "network", *flags]) == 78
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "levels",
    [
        None,
        [],
        {"intra_node": 5},
        {"intra_node": {"link": {"latency_s": 1.0}}},
        {"intra_node": {"link": {"gbit": 1.0}}},
    ],
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
    links = ["--intra-node", "3,1200", "--inter-node", "10,100"]
    assert main(["bench", "predict", *links, "--json", str(out), profile]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("32 samples a rank: forward 10.0 ms, backward 20.0 ms")
    assert len([line for line in lines if line.startswith("| all-reduce |")]) == 8
    assert any("| 1,024 | 128 |" in line for line in lines)
    read = json.loads(out.read_text())
    assert len(read) == 3 * 8
    assert all(0 < each["efficiency"] <= 1.3 for each in read)


def test_a_prediction_says_what_it_has_been_compared_with(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "predict", "--intra-node", "5,200", profile]) == 0
    assert "Predicted, not measured. Predictions have been compared with measurements on 4 ranks of one machine" in (
        capsys.readouterr().out
    )


def test_a_prediction_from_measured_links(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = NetworkReport("nccl", Topology(1, 8), (), {"intra_node": Level(Link(1e-6, 1e11), "nccl", 0.1)})
    links = tmp_path / "links.json"
    links.write_text(json.dumps(report.to_json()))
    within = tmp_path / "report.json"
    within.write_text(json.dumps({"profile": PROFILE.to_json()}))
    arguments = ["--links", str(links), "--inter-node", "10,100", "--ranks", "8,64", "--global-batch", "512"]
    assert main(["bench", "predict", *arguments, str(within)]) == 0
    assert capsys.readouterr().out.count("| sharded |") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}"], "needs a network"),
        (["--intra-node", "5", "{}"], "--intra-node 5: write microseconds and Gbit/s"),
        (["--intra-node", "5,0", "{}"], "--intra-node 5,0: a link's bandwidth"),
        (["--intra-node", "5,100", "--ranks", "8,x", "{}"], "--ranks 8,x"),
        (["--intra-node", "5,100", "--ranks", "12", "{}"], "12 ranks don't fill nodes of 8"),
        (["--intra-node", "5,100", "--batch", "0", "{}"], "--batch 0.0"),
        (["--intra-node", "5,100", "--batch", "8", "--global-batch", "8", "{}"], "exclude each other"),
        (["--intra-node", "5,100", "no_such.json"], "no_such.json: No such file"),
        (["--links", "{}", "{}"], "is no report of `evenstep bench network --json`"),
        (["--intra-node", "5,100", __file__], "is no JSON"),
        (["--intra-node", "5,100", "--json", "/proc/no/such", "{}"], "--json /proc/no/such"),
    ],
)
def test_predictions_that_make_no_sense(
    profile: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "predict", *(each.format(profile) for each in arguments)]) == 78
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_of_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["network"], ["predict"], ["memory"]):
        with pytest.raises(SystemExit) as caught:
            main(["bench", *arguments, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: evenstep bench {arguments[0]}")
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    assert "FILE.py:FUNCTION" in capsys.readouterr().out


def test_commands_of_the_page_are_commands() -> None:
    """Every `evenstep` command of the page is one that its parser takes."""
    commands = re.findall(r"^evenstep (bench|estimate) (.*)$", pages.text("how-to/predict.md"), re.MULTILINE)
    seen = set()
    for command, rest in commands:
        args = whole_parser().parse_args([command, *shlex.split(rest)])
        seen.add(args.action if command == "bench" else command)
    assert seen == {"estimate", "network", "predict", "memory"}
