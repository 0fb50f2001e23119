"""What is said of an exception that ends a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from evenstep import cli
from evenstep.health.last_words import describe
from evenstep.launcher import worker


def raised_by_running(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """What a rank whose script is this text ends with."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(BaseException) as caught:
        worker.become_script(str(script), [])
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without this function


def test_a_syntax_error_of_the_script_is_shown_without_what_compiled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = describe(raised_by_running(tmp_path, "x = (\n", monkeypatch))
    assert text.splitlines()[0] == f'  File "{tmp_path}/script.py", line 1'
    assert text.splitlines()[-1] == "SyntaxError: '(' was never closed"


def test_a_syntax_error_is_shown_alone_in_a_rank_that_was_copied_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a rank has the command on its stack, which isn't part of the machinery that starts ranks."""
    started_with = compile("def main(run): run()", cli.__file__, "exec")
    names: dict[str, Any] = {}
    exec(started_with, names)
    error = raised_by_running(tmp_path, "x = (\n", monkeypatch)
    trace = error.__traceback__

    def fail() -> None:
        raise error.with_traceback(trace)

    with pytest.raises(SyntaxError) as caught:
        names["main"](fail)
    assert any(entry.path.name == "cli.py" for entry in caught.traceback)
    assert describe(caught.value).splitlines()[0] == f'  File "{tmp_path}/script.py", line 1'


def test_a_syntax_error_of_a_module_is_shown_with_the_line_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_a_mistake.py").write_text("x = (\n")
    lines = describe(raised_by_running(tmp_path, "import with_a_mistake\n", monkeypatch)).splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{tmp_path}/script.py", line 1, in <module>']
    assert f'  File "{tmp_path}/with_a_mistake.py", line 1' in lines
    assert "launcher" not in "\n".join(lines)


@pytest.mark.parametrize(("typo", "meant"), [("worl", "world"), ("sys.argb", "argv")])
def test_a_typo_is_shown_with_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typo: str, meant: str
) -> None:
    """As python itself shows it, in every version."""
    text = describe(raised_by_running(tmp_path, f"import sys\nworld = 1\n{typo}\n", monkeypatch))
    assert text.endswith(f". Did you mean: '{meant}'?")
    assert text.count("Did you mean") == 1


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
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/script.py", line 6, in <module>',
        "    wait()",
        "evenstep.errors.PeerLostError: gone",
    ]


def test_a_users_mistake_is_told_with_the_users_line_and_not_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import contextlib
from evenstep.errors import UsageError

error = UsageError("so not")
scope = {"error": error, "contextlib": contextlib}
exec(compile("@contextlib.contextmanager\\ndef block():\\n    yield\\n    raise error", PACKAGES, "exec"), scope)
with scope["block"]():
    pass
""".replace("PACKAGES", repr(str(Path(cli.__file__).with_name("some.py"))))
    told = describe(raised_by_running(tmp_path, text, monkeypatch))
    assert told.splitlines()[-1].strip() == f"at {tmp_path}/script.py, line 8, in <module>"
