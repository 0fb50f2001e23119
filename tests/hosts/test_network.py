"""Networks of hosts: taken down with whoever made them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from tests import namespaces

MAKES_NAMESPACES = """
    import time
    from tests.namespaces import Namespaces

    with Namespaces(1) as hosts:
        print(hosts._prefix, flush=True)
        for _ in range(600):  # a signal that comes just before a sleep is handled after it
            time.sleep(0.1)
"""


@pytest.mark.brief
@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_namespaces_are_gone_with_their_process_or_with_the_next(ends_by: signal.Signals) -> None:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    program = [sys.executable, "-c", textwrap.dedent(MAKES_NAMESPACES)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        prefix = process.stdout.readline().strip()
        assert prefix
        process.send_signal(ends_by)
        assert process.wait(30) == -ends_by
    left = {f"{prefix}-0", f"{prefix}-switch"} if ends_by == signal.SIGKILL else set()
    assert set(namespaces.sweep()) & {f"{prefix}-0", f"{prefix}-switch"} == left
    assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
