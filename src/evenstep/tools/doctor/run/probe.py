"""One rank of a run under watch, started by `evenstep run` with the plan, the script and its arguments.

The script runs as it is. After enough optimizer steps its loops over data get one more batch each, so that it comes to
its end soon; a script that makes steps without a loader is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenstep.ground.environment import current_placement
from evenstep.tools.doctor.run.events import Place, Plan
from evenstep.tools.doctor.run.record_collectives import Collectives
from evenstep.tools.doctor.run.record_data import Loaders, watch_fetches
from evenstep.tools.doctor.run.record_devices import Devices
from evenstep.tools.doctor.run.record_output import Output
from evenstep.tools.doctor.run.record_steps import Steps
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed

_MOST_HURRIED = 24  # steps after those that are looked at; a script without a loader is ended then
_LONGEST_FAREWELL_S = 8.0


class Probe:
    """Watches this process."""

    def __init__(self, plan: Plan, rank: int, script: str) -> None:
        self.recorder = Recorder(plan, rank, script)
        self._output = Output(self.recorder)

    def install(self, patches: Patches) -> None:
        """Watch until the patches are undone."""
        recorder = self.recorder
        self._devices = Devices(recorder, patches)
        Scratch(Path(recorder.plan.directory), self._output.writes).install(patches)
        idle_checkpointers(patches)
        Loaders(recorder).install(patches)
        watch_fetches(patches, recorder)
        Collectives(recorder, self._output.look_for_trackers).install(patches)
        Steps(recorder, self._stepped).install(patches)
        self._output.install(patches)
        recorder.watch_idleness(patches)

    def _stepped(self) -> None:
        recorder = self.recorder
        self._devices.stepped()
        made, enough = recorder.num_steps, recorder.plan.num_steps
        if made == enough:
            recorder.note("over")
            recorder.is_over = True
        elif made >= enough + _MOST_HURRIED:
            self._leave()

    def _leave(self) -> None:
        recorder = self.recorder
        recorder.note("left")
        done = Path(recorder.plan.directory)
        (done / f"left-{recorder.rank}").touch()
        deadline = time.monotonic() + _LONGEST_FAREWELL_S
        # A rank that leaves first closes connections that others may still read from.
        while len(list(done.glob("left-*"))) < recorder.plan.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
        if threading.current_thread() is not threading.main_thread():
            os._exit(0)
        raise SystemExit(0)

    def run(self, script: str, arguments: Sequence[str]) -> None:
        """Become the script, and write down how it ends."""
        recorder = self.recorder
        recorder.note("start", pid=os.getpid())
        status: Any = 0
        try:
            run_observed(script, arguments)
        except BaseException as error:
            is_exit = isinstance(error, SystemExit)
            status = error.code if isinstance(error, SystemExit) else 1
            if not is_exit or status not in (None, 0):
                facts = {"type": type(error).__name__, "message": str(error)[:2000]}
                recorder.write("raised", _places_of(error, recorder), facts)
            raise
        finally:
            has_group = dist.is_available() and dist.is_initialized()
            recorder.write("end", [], {"status": str(status or 0), "has_group": has_group})


def _places_of(error: BaseException, recorder: Recorder) -> list[Place]:
    """Lines of the script in the traceback, innermost first; of a syntax error its own."""
    found: list[Place] = []
    tb = error.__traceback__
    while tb is not None:
        file = recorder.own_file(tb.tb_frame.f_code.co_filename)
        if file:
            found.insert(0, (file, tb.tb_lineno))
        tb = tb.tb_next
    return found[:4]


def main(arguments: Sequence[str]) -> None:
    """Have this process watched, and run the script in it.

    Args:
        arguments: The file of the plan, the script and its own arguments.
    """
    file, script, *rest = arguments
    probe = Probe(Plan.read(Path(file)), current_placement().rank, script)
    with Patches() as patches:
        probe.install(patches)
        probe.run(script, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
