"""What is said of an exception that ends a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evenstep.errors import PeerLostError
from evenstep.ground.environment import Placement
from evenstep.ground.health.excepthook import describe, install
from evenstep.launcher.spawn import script_runner


def raised_by_running(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What a rank whose script is this text ends with."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(BaseException) as caught:
        script_runner.become_script(str(script), [])
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without this function


def test_who_lost_a_peer_is_shown_where_it_waited_and_not_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames are of the transport, where nothing is wrong."""
    script = """
from pathlib import Path
import evenstep, evenstep.errors
code = compile("def wait(): raise evenstep.errors.PeerLostError('gone')", evenstep.__file__, "exec")
exec(code)
wait()
"""
    lines = describe(raised_by_running(tmp_path, script, monkeypatch)).splitlines()
    lines = [line for line in lines if line.strip(" ~^")]  # python 3.13 underlines the call
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/script.py", line 6, in <module>',
        "    wait()",
        "evenstep.errors.PeerLostError: gone",
    ]


def test_a_mistake_is_told_with_what_the_users_code_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From that code on; not what a library raised, or evenstep."""
    text = """
import evenstep
import json

def inner():
    raise TypeError("not this one")

def count(samples):
    return inner()

class Samples:
    __len__ = COUNT
    __getitem__ = None

evenstep.DataLoader(Samples(), 1, world=evenstep.World.alone(device="cpu"))
"""
    told = describe(raised_by_running(tmp_path, text.replace("COUNT", "count"), monkeypatch)).splitlines()
    assert told[0].startswith("ConfigurationError: DataLoader: len() of the data set (Samples) fails: not this one")
    assert told[1:4] == [
        f"  at {tmp_path}/script.py, line 15, in <module>",
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/script.py", line 9, in count',
    ]
    assert told[-1] == "TypeError: not this one"
    told = describe(raised_by_running(tmp_path, text.replace("COUNT", "json.loads"), monkeypatch)).splitlines()
    assert "fails: the JSON object must be str" in told[0]
    assert told[1:] == [f"  at {tmp_path}/script.py, line 15, in <module>"]


@pytest.mark.parametrize(
    ("folder", "error", "writes"),
    [
        (".", ValueError("boom"), True),
        (".", PeerLostError("rank 1 is gone"), False),
        ("gone", ValueError("boom"), False),
    ],
)
def test_torchrun_gets_its_file_and_the_error_ends_the_process_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, error: Exception, writes: bool
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    file = tmp_path / folder / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    install(Placement())
    with pytest.raises(SystemExit) as end:
        sys.excepthook(type(error), error, None)
    assert end.value.code == getattr(error, "exit_code", 1)
    assert file.exists() == writes
    if writes:
        told = json.loads(file.read_text())["message"]
        assert told["message"] == "ValueError: boom"
        assert "ValueError: boom" in told["extraInfo"]["py_callstack"]
