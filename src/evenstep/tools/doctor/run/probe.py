"""One rank of a watched run, started by `evenstep run` with the plan, the script and its arguments.

The script runs unchanged. After enough optimizer steps, its loops over data get one more batch each, so that it ends
soon. A script that makes steps without a loader is ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenstep.ground.environment import current_placement
from evenstep.tools.doctor.run.events import Plan
from evenstep.tools.doctor.run.notes import Notes
from evenstep.tools.doctor.run.writer import Writer
from evenstep.tools.observing.launch import leave_together
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder
from evenstep.tools.observing.scratch import Scratch, idle_checkpointers
from evenstep.tools.observing.script import run_observed

_MOST_HURRIED = 24  # steps after the watched ones; a script without a loader is ended then
_LONGEST_FAREWELL_S = 8.0


class Probe:
    """Records the events of this process."""

    def __init__(self, plan: Plan, rank: int, script: str) -> None:
        self.writer = Writer(plan, rank, script)

    def install(self, patches: Patches) -> None:
        """Start to record, until the patches are undone."""
        writer = self.writer
        Scratch(Path(writer.plan.directory), lambda path: writer.note("write", path=path)).install(patches)
        idle_checkpointers(patches)
        Recorder(Notes(writer, self.stepped)).install(patches)
        writer.watch_idleness(patches)

    def stepped(self) -> None:
        """Called when the optimizer that counts steps has stepped: notes when enough were made, or ends the script."""
        made, enough = self.writer.num_steps, self.writer.plan.num_steps
        if made == enough:
            self.writer.note("over")
            self.writer.is_over = True
        elif made >= enough + _MOST_HURRIED:
            self._leave()

    def _leave(self) -> None:
        self.writer.note("left")
        plan = self.writer.plan
        leave_together(Path(plan.directory), self.writer.rank, plan.world_size, _LONGEST_FAREWELL_S)

    def run(self, script: str, arguments: Sequence[str]) -> None:
        """Run the script in this process, and record how it ends."""
        writer = self.writer
        writer.note("start", pid=os.getpid())
        status: Any = 0
        try:
            run_observed(script, arguments)
        except BaseException as error:
            status = error.code if isinstance(error, SystemExit) else 1
            if not isinstance(error, SystemExit) or status not in (None, 0):
                facts = {"type": type(error).__name__, "message": str(error)[:2000]}
                writer.write("raised", writer.script.places_of(error), facts)
            raise
        finally:
            has_group = dist.is_available() and dist.is_initialized()
            writer.write("end", [], {"status": str(status or 0), "has_group": has_group})


def main(arguments: Sequence[str]) -> None:
    """Run the script in this process, and record its events.

    Args:
        arguments: The path of the plan, the script and the script's arguments.
    """
    file, script, *rest = arguments
    probe = Probe(Plan.read(Path(file)), current_placement().rank, script)
    with Patches() as patches:
        probe.install(patches)
        probe.run(script, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
