"""One rank of a measured run: `python -m evenstep.bench.rank SCRIPT ARGS...`, started by `evenstep run`."""

from __future__ import annotations

import os
import sys

from evenstep.bench.probe import Probe
from evenstep.environment import current_placement, measurement
from evenstep.errors import ConfigurationError
from evenstep.launcher.worker import become_script


def main(arguments: list[str]) -> None:
    """Have this process watched, and run the script in it.

    Raises:
        ConfigurationError: Nobody asked for a measurement.
    """
    asked = measurement()
    if asked is None:
        raise ConfigurationError("evenstep.bench.rank is started by `evenstep bench`, and is no command of its own.")
    if sys.path and sys.path[0] == os.getcwd():
        del sys.path[0]  # put there for `-m`; a script doesn't have it
    probe = Probe(asked, current_placement())
    probe.install()
    path, *rest = arguments
    try:
        become_script(path, rest)
    finally:
        probe.write()


if __name__ == "__main__":
    main(sys.argv[1:])
