"""Files that a person names: what is no script is refused with one line, and a report overwrites no script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.cli.main import main
from evenstep.ground.host.named_files import MOST_BYTES, replace_file, write_report

COMMANDS = [
    ["doctor"],
    ["doctor", "--no-run"],
    ["convert"],
    ["verify"],
    ["verify", "--resume"],
    ["bench"],
    ["bench", "compare", "good.py"],
    ["estimate"],
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.py").write_text("import torch\n")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 78) -> str:
    """The one line of a command that did nothing."""
    assert main(arguments) == status
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1), said
    assert said.err.startswith("evenstep: ")
    assert said.err[:-1].isprintable()
    return said.err


def a_pipe(name: str) -> str:
    os.mkfifo(name)
    return name


def a_file(name: str, data: bytes) -> str:
    Path(name).write_bytes(data)
    return name


BAD = {
    "a pipe": (lambda: a_pipe("pipe.py"), "isn't a regular file"),
    "zeros without end": (lambda: os.symlink("/dev/zero", "zero.py") or "zero.py", "isn't a regular file"),
    "a directory": (lambda: os.mkdir("folder.py") or "folder.py", "is a directory"),
    "nothing": (lambda: "nowhere.py", "no such script"),
    "a long name": (lambda: "x" * 300 + ".py", "can't be read: File name too long"),
    "a name with escapes": (lambda: a_file("\x1b[31mred.py", b"x = 1\n"), "a name with characters that can't be"),
    "a name that is no text": (lambda: a_file(os.fsdecode(b"\xff.py"), b"x = 1\n"), "a name with characters that"),
    "no encoding of text": (lambda: a_file("rot.py", b"# coding: rot13\nk = 1\n"), "not text in the encoding"),
    "no encoding at all": (lambda: a_file("klingon.py", b"# coding: klingon\n"), "not text in the encoding"),
    "no text": (lambda: a_file("latin.py", "x = 'ä'\n".encode("latin-1")), "not text in the encoding"),
    "a program": (lambda: a_file("elf.py", b"\x7fELF\0\0\0"), "a python script"),
    "too much": (lambda: a_file("large.py", b"#" * (MOST_BYTES + 1)), "more than 2 MiB"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.timeout(20)
def test_what_is_no_script_is_refused_alike(name: str, command: list[str], capsys: pytest.CaptureFixture[str]):
    make, message = BAD[name]
    assert message in refused(capsys, *command, make())


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in (["bench"], ["convert"])], ids=" ".join)
@pytest.mark.parametrize("target", ["good.py", "./good.py", "other.py", "link", "hard", "folder", "no/such.json"])
def test_a_report_overwrites_no_script(target: str, command: list[str], capsys: pytest.CaptureFixture[str]):
    Path("link").symlink_to("good.py")
    os.link("good.py", "hard")
    Path("folder").mkdir()
    Path("other.py").write_text("y = 2\n")
    said = refused(capsys, *command[:2], "--json", target, *command[2:], "good.py")
    assert f"--json {target}: " in said
    assert (Path("good.py").read_text(), Path("other.py").read_text()) == ("import torch\n", "y = 2\n")


def test_two_reports_are_two_files(capsys: pytest.CaptureFixture[str]):
    assert "--sarif ./out.json" in refused(capsys, "doctor", "--json", "out.json", "--sarif", "./out.json", "good.py")


def test_a_full_disk_is_74(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--no-run", "--json", "/dev/full", "good.py"]) == 74
    assert "evenstep: /dev/full can't be written: No space left on device.\n" in capsys.readouterr().err


def test_a_file_is_replaced_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    path = Path("report.json")
    write_report(path, "first")
    path.chmod(0o640)
    write_report(path, "second")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", 0o640)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"report\.json"):
        write_report(path, "third")
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"third")
    assert path.read_text() == "second"
    assert sorted(os.listdir()) == ["good.py", "report.json"]
