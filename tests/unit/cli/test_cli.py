"""The command line in this process: what ends before a rank is started."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.cli import main as cli
from evenstep.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("print('ran')")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command prints."""
    assert main(["run", *arguments]) == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("evenstep: ")
    assert err.count("\n") == 1
    return err


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no/such.py: no such script" in refused(capsys, "--nproc-per-node", "2", "no/such.py")


def test_a_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a directory" in refused(capsys, str(tmp_path))


def test_a_module_or_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no module named 'no_such_module.x'" in refused(capsys, "-m", "no_such_module.x")
    assert "no such program" in refused(capsys, "--no-python", "no-such-program")
    assert "exclude each other" in refused(capsys, "--no-python", "-m", "json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node", "0"], "at least 1 rank"),
        (["--nproc-per-node", "many"], "use auto, cpu, gpu or a number"),
        (["--threads-per-rank", "0"], "0 threads per rank"),
        (["--device", "gpu0"], "no device"),
        (["--nnodes", "none"], "--nnodes none"),
        (["--nnodes", "2", "--node-rank", "5"], "--node-rank 5: with --nnodes 2 it lies between 0 and 1"),
        (["--nnodes", "1:4", "--node-rank=-1"], "--node-rank -1"),
        (["--node-rank", "1"], "with --nnodes 1 it is 0"),
        (["--nproc-per-node", "2", "--local-ranks-filter", "7"], "--local-ranks-filter 7: no such rank on this host"),
        (["--nproc-per-node", "2", "--local-ranks-filter", "0,2"], "there are 0 and 1"),
        (["--nproc-per-node", "1", "--tee", "1:3"], "--tee 1:3: no such rank on this host; there is 0"),
        (["--nproc-per-node", "8", "--redirects", "8:3"], "there are 0 to 7"),
        (["--log-dir", "/proc/foo"], "--log-dir /proc/foo: No such file or directory"),
        (["--log-dir", __file__], f"--log-dir {__file__}: Not a directory"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag. See `evenstep run --help`."),
        (["--node-rank", "first"], "argument --node-rank/--node_rank: invalid int value: 'first'."),
        (["--redirects", "7"], "--redirects 7"),
        (["--rdzv-endpoint", "here"], "HOST:PORT"),
        (["--logs-specs", "x"], "--logs-specs"),
    ],
)
def test_flags_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], script: str, flags: list[str], message: str
) -> None:
    assert message in refused(capsys, *flags, script)


def test_more_ranks_than_gpus(capsys: pytest.CaptureFixture[str], script: str) -> None:
    num_ranks = torch.cuda.device_count() + 1
    said = refused(capsys, "--device", "cuda", "--nproc-per-node", str(num_ranks), script)
    assert f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on this node" in said


@pytest.mark.parametrize("flag", ["--master-port={}", "--rdzv-endpoint=localhost:{}", "--rdzv-endpoint=127.0.0.1:{}"])
def test_a_port_in_use_is_named_with_its_owner(capsys: pytest.CaptureFixture[str], script: str, flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = refused(capsys, flag.format(port), script)
    assert f"port {port} is in use by pid {os.getpid()}" in line


def test_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys).startswith("evenstep: the following arguments are required: script. See `evenstep run")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("rnu", "evenstep: rnu is no command. Did you mean run? There are run, "),
        ("train.py", "evenstep: train.py is no command. Did you mean evenstep run train.py? There are run, "),
        ("no-such-command", "evenstep: no-such-command is no command. There are run, "),
    ],
)
def test_an_unknown_command(capsys: pytest.CaptureFixture[str], given: str, told: str) -> None:
    assert main([given, "--nproc-per-node", "2"]) == 78
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(told)


def test_without_a_command_there_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    listed = re.findall(r"^    ([a-z]+)\b", text, re.MULTILINE)
    assert listed == list(cli.COMMANDS)


def test_help_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: evenstep run ")
    for flag in ("--nproc-per-node", "--threads-per-rank", "--device", "--all-ranks", "--log-dir", "--max-restarts"):
        assert flag in text
    assert "--logs-specs" not in text


def test_python_m_evenstep_is_the_same_command() -> None:
    called = [sys.executable, "-m", "evenstep", "--version"]
    assert (
        subprocess.run(called, capture_output=True, text=True, check=True).stdout
        == f"evenstep {evenstep.__version__}\n"
    )


@pytest.mark.parametrize(
    "action", ["list", "show", "verify", "diff", "export", "import"], ids=lambda action: f"checkpoint-{action}"
)
def test_a_directory_that_may_not_be_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """One line, and no traceback: root may list everything, so the refusal is played."""
    torch.save({"model": {"weight": torch.ones(1)}}, tmp_path / "states.pt")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    more = {"diff": [str(tmp_path)], "export": [str(tmp_path / "out")]}.get(action, [])
    first = [str(tmp_path / "states.pt")] if action == "import" else []
    assert main(["checkpoint", action, *first, str(tmp_path), *more]) == 74
    err = capsys.readouterr().err
    assert err == f"evenstep: {tmp_path}: Permission denied. Run this as a user who may read and write there.\n"


@pytest.mark.parametrize(
    ("command", "flags"), [("bench", []), ("verify", []), ("jobs", ["slurm"])], ids=["bench", "verify", "jobs"]
)
def test_a_scripts_own_flags_may_look_like_abbreviations_of_ours(
    command: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--r` could be several of ours; behind the script it is none of them."""
    status = main([command, *flags, "no_such_script.py", "--r", "5", "--n", "6", "--re=1", "--c"])
    assert "ambiguous" not in capsys.readouterr().err
    assert status in (0, 1, 2, 78)
