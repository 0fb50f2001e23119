"""`evenstep env`, and what `evenstep run --check` decides."""

from __future__ import annotations

import pytest
import torch

from evenstep.cli.main import main
from evenstep.errors import ConfigurationError
from evenstep.launcher.options.flags import parse, placed_by
from evenstep.tools.preflight.rank_check import choose_pairs, slow_pairs

_SET_BY_TORCH = ("PIP_DISABLE_PIP_VERSION_CHECK", "1")  # collect_env leaves it in the environment


def test_env_prints_every_section(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PMI_SHARED_SECRET", "sesame")
    monkeypatch.setenv(*_SET_BY_TORCH)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for word in ("evenstep ", "torch ", "cores ", "/dev/shm", "open files", "none: one process", "gloo", "NCCL_DEBUG"):
        assert word in text
    assert f"PyTorch version: {torch.__version__}\n" in text
    assert "sesame" not in text


def test_env_shows_a_contradiction_instead_of_failing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv(*_SET_BY_TORCH)
    assert main(["env"]) == 0
    assert "OMPI_COMM_WORLD_SIZE=2 look like Open MPI, but" in capsys.readouterr().out


def test_pairs() -> None:
    assert choose_pairs([0, 0, 1]) == [(0, 1), (0, 2), (1, 2)]
    many = choose_pairs([rank // 4 for rank in range(16)], limit=12)
    assert many[:6] == [(0, 4), (0, 8), (0, 12), (4, 8), (4, 12), (8, 12)], "every host with every other first"
    assert many[6:] == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)], "and then neighbours of one host"


def test_slow_pairs() -> None:
    assert slow_pairs({(0, 1): 1.0, (0, 2): 1.2, (1, 2): 9.0}) == [(1, 2)]
    assert slow_pairs({(0, 1): 1.0, (0, 2): 9.0}) == [], "of two, nobody knows which is the odd one"


def test_the_flag_check_stands_for_a_script() -> None:
    args = parse(["--nproc-per-node", "2", "--check"])
    assert (args.training_script, args.module) == ("evenstep.tools.preflight.rank_check", True)
    args = parse(["--nproc-per-node", "2", "train.py", "--check"])
    assert (args.training_script, args.training_script_args, args.module) == ("train.py", ["--check"], False)
    with pytest.raises(ConfigurationError, match="--check runs no script"):
        parse(["--check", "train.py"])


def test_hosts_that_another_launcher_placed_need_no_flags() -> None:
    arguments = ["--nnodes", "2", "train.py", "--node-rank", "7"]
    task = (1, "gpu07", 21000)
    args = placed_by(task, parse(arguments), arguments)
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "gpu07", 21000)
    said = ["--nnodes", "2", "--node-rank=0", "train.py"]
    assert placed_by(task, parse(said), said).node_rank == 0
    assert placed_by(None, parse(arguments), arguments).node_rank == 0
