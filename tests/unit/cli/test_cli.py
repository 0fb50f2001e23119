"""The command line in this process: what ends before a rank is started."""

from __future__ import annotations

import os
import re
import signal
import socket
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from evenstep.cli import main as cli
from evenstep.cli.commands import whole_parser
from evenstep.cli.main import main
from evenstep.errors import EXIT_PREEMPTED, EXIT_SCRIPT_FAILED, EvenstepError
from evenstep.launcher.run import _stopped_by
from tests import pages


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
        (["--device", "gpu0"], "a device"),
        (["--nnodes", "none"], "--nnodes none"),
        (["--nnodes", "2", "--node-rank", "5"], "--node-rank 5: with --nnodes 2 it lies between 0 and 1"),
        (["--nnodes", "1:4", "--node-rank=-1"], "--node-rank -1"),
        (["--node-rank", "1"], "with --nnodes 1 it is 0"),
        (
            ["--nnodes", "2", "--node-rank", "1"],
            "--node-rank 1 of 2: where is node 0? Give all nodes its address, with",
        ),
        (["--nproc-per-node", "2", "--local-ranks-filter", "7"], "--local-ranks-filter 7: no such rank on this host"),
        (["--log-dir", __file__], f"--log-dir {__file__}: Not a directory"),
        (["--node-rank", "first"], "argument --node-rank: invalid int value: 'first'."),
        (["--redirects", "7"], "--redirects 7"),
        (["--rdzv-endpoint", "here"], "HOST:PORT"),
        (["--logs-specs", "x"], "--logs-specs"),
        (["--event-log-handler", "x"], "--event-log-handler='x'"),
        (["--phase-timeout", "x=1"], "with a phase of starting"),
    ],
)
def test_flags_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], script: str, flags: list[str], message: str
) -> None:
    assert message in refused(capsys, *flags, script)


def test_a_command_that_is_refused_late_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], script: str, tmp_path: Path
) -> None:
    given = ["--nnodes", "2", "--rdzv-conf", "nonsense", "--log-dir", str(tmp_path / "logs")]
    assert main(["run", *given, script]) == 78
    assert "nonsense" in capsys.readouterr().err
    assert [*(tmp_path / "logs").iterdir()] == []


@pytest.mark.parametrize("flag", ["--master-port={}", "--rdzv-endpoint=localhost:{}"])
def test_a_port_in_use_is_named_with_its_owner(capsys: pytest.CaptureFixture[str], script: str, flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = refused(capsys, flag.format(port), script)
    assert f"port {port} is in use by pid {os.getpid()}" in line


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("rnu", "evenstep: rnu is no command. Did you mean evenstep run? There are run, "),
        ("train.py", "evenstep: train.py is no command. Did you mean evenstep run train.py? There are run, "),
        ("memory", "evenstep: memory is no command. Did you mean evenstep estimate? There are run, "),
        ("xyzzy", "evenstep: xyzzy is no command. There are run, "),
    ],
)
def test_an_unknown_command(capsys: pytest.CaptureFixture[str], given: str, told: str) -> None:
    assert main([given, "--nproc-per-node", "2"]) == 78
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(told)


def test_a_command_without_a_script_says_that_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--steps", "2"]) == 78
    assert capsys.readouterr().err == (
        "evenstep: the following arguments are required: script. See `evenstep verify --help`.\n"
    )


def test_without_a_command_there_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 78
    text = capsys.readouterr().out
    listed = re.findall(r"^    ([a-z]+)\b", text, re.MULTILINE)
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize("action", ["list", "export"], ids=lambda action: f"checkpoint-{action}")
def test_a_directory_that_may_not_be_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """One line, and no traceback: root may list everything, so the refusal is played."""

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    more = [str(tmp_path / "out")] if action == "export" else []
    assert main(["checkpoint", action, str(tmp_path), *more]) == 74
    err = capsys.readouterr().err
    assert err == f"evenstep: {tmp_path} can't be used: Permission denied.\n"


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_a_scripts_own_flags_may_look_like_abbreviations_of_ours(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--r` could be several of ours; behind the script it is none of them."""
    status = main([command, "no_such_script.py", "--r", "5", "--n", "6", "--re=1", "--c"])
    assert "ambiguous" not in capsys.readouterr().err
    assert status in (0, 1, 2, 78)


# ---------------------------------------------------------------------- all commands alike

TAKE_A_SCRIPT = [
    ["run"],
    ["bench"],
    ["bench", "run"],
    ["estimate"],
    ["verify"],
    ["verify", "--resume"],
    ["doctor"],
    ["convert"],
]


@pytest.mark.parametrize("command", TAKE_A_SCRIPT, ids=" ".join)
def test_a_missing_script_is_78_everywhere(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "no/such.py"]) == 78
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("evenstep: no/such.py: ")


def every_parser() -> dict[str, ArgumentParser]:
    """By what one types, such as "evenstep bench run"."""
    found: dict[str, ArgumentParser] = {}

    def add(parser: ArgumentParser) -> None:
        found[parser.prog] = parser
        for action in parser._actions:
            for each in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
                add(each)

    add(whole_parser())
    return found


PARSERS = every_parser()


@pytest.mark.parametrize("prog", PARSERS)
def test_a_wrong_call_is_78_in_every_command(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*prog.split()[1:], "--no-such-flag"]) == 78
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("evenstep: ")
    assert "--help`" in err or "--help." in err


@pytest.mark.parametrize("prog", PARSERS)
def test_every_flag_says_its_default_in_one_way(prog: str) -> None:
    """Where it has one, as "(default: 900)"; none is said in another way."""
    for action in PARSERS[prog]._actions:
        if action.help in (None, SUPPRESS) or not action.option_strings:
            continue
        text = action.help
        assert not re.search(r"Default:|; default|left out|; \d+$", text), f"{prog} {action.option_strings}: {text}"
        if action.default not in (None, SUPPRESS, False, "", 0) and action.nargs != 0:
            assert "(default: " in text or "; with --resume" in text, f"{prog} {action.option_strings}: {text}"


def test_the_most_used_flags_of_run_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    flags = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert flags[:5] == ["--nproc-per-node", "--device", "--all-ranks", "--log-dir", "--max-restarts"]
    assert not [flag for flag in flags if "_" in flag]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node", "--ranks", "--replicas", "--ranks-per-node"])
def test_the_number_of_ranks_has_one_name_and_the_same_others_everywhere(flag: str) -> None:
    parser = whole_parser()
    for before, value, after, expected in (
        (["run"], "2", ["x.py"], "2"),
        (["bench", "run"], "1,2", ["x.py"], (1, 2)),
        (["verify"], "1,2", ["x.py"], (1, 2)),
        (["doctor"], "2", ["x.py"], 2),
    ):
        assert parser.parse_args([*before, flag, value, *after]).nproc_per_node == expected


def test_a_command_of_bench_may_be_left_out() -> None:
    from evenstep.cli import bench

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bench._SUBCOMMANDS, "run", (lambda args: seen.append(args) or 7, *bench._SUBCOMMANDS["run"][1:]))
        for given in (["train.py", "--x"], ["run", "train.py", "--x"], ["run", "--steps", "30", "train.py", "--x"]):
            assert main(["bench", *given]) == 7
        assert main(["bench", "run", "run"]) == 7, "a script may be called as a sub-command"
    assert [(args.script, args.arguments) for args in seen] == 3 * [("train.py", ["--x"])] + [("run", [])]


# ---------------------------------------------------------------------- pages


def test_the_page_of_the_command_line_has_every_command() -> None:
    text = pages.text("reference/command-line.md")
    shown = {f"evenstep {each}".strip() for each in re.findall(r"^```\{command-help\} ?(.*)$", text, re.MULTILINE)}
    assert shown == set(PARSERS)


def test_the_page_of_exit_statuses_has_every_status() -> None:
    def codes(error: type[EvenstepError]) -> set[int]:
        return {error.exit_code}.union(*(codes(each) for each in error.__subclasses__()))

    of_commands, of_run = pages.text("reference/command-line.md").split("## `evenstep run`")
    listed = {int(each) for each in re.findall(r"^\| (\d+) \|", of_run, re.MULTILINE)}
    assert codes(EvenstepError) - {1} | {0, EXIT_PREEMPTED, 130} == listed
    assert {0, 1, EXIT_SCRIPT_FAILED, 74, 78, 130} == {int(n) for n in re.findall(r"^\| (\d+) \|", of_commands, re.M)}


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--nprocs-per-node", "--nproc-per-node"), ("--nproc", "--nproc-per-node"), ("--maxrestarts", "--max-restarts")],
)
def test_an_option_that_was_meant_is_named(
    option: str, meant: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f" Did you mean {meant}?" in refused(capsys, option, "2", script)


def test_a_fault_of_a_rank_that_there_is_not(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--nproc-per-node", "2", "--inject", "kill:rank=2,step=1", script)
    assert "there is no rank 2; there are 2, from 0" in said


def test_a_second_request_changes_no_status_and_handlers_are_as_before() -> None:
    """Slurm sends SIGTERM some time after the signal that a job asked for: perhaps just before the launcher ends."""
    before = signal.getsignal(signal.SIGTERM)
    with _stopped_by("SIGTERM, SIGUSR1"):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    try:
        with pytest.raises(SignalException, match="SIGUSR1"), _stopped_by("SIGTERM,SIGUSR1"):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
