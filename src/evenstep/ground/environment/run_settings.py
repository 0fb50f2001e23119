"""Settings that evenstep's commands pass to the ranks that they start, in one variable. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from evenstep.errors import ConfigurationError

VARIABLE = "EVENSTEP_SETTINGS"
NODE_TIMEOUT_S = 30.0  # seconds for which another node, or a parameter server's peer, may be silent


@dataclass(frozen=True)
class Measurement:
    """The settings of a run that `evenstep bench` measures.

    Attributes:
        directory: The directory to which every rank writes its record.
        num_steps: Number of measured optimizer steps, after warm-up steps; then the run ends with status 0.
        global_batch_size: Samples of a step on all ranks together; None: the script's value.
        growth: A factor for sizes in other units than samples (`max_tokens`).
        watches_losses: Whether ranks record losses, and begin with a seed.
    """

    directory: str
    num_steps: int = 1
    global_batch_size: int | None = None
    growth: int = 1
    watches_losses: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Settings that no command has set have their defaults.

    Attributes:
        launcher: Evenstep's launcher that started the ranks: "run", "launch"; "": none.
        store: Path at which the rendezvous file of one node's ranks can be opened.
        pages: Paths at which the heartbeat pages of the node's ranks can be opened, by local rank.
        device: From `evenstep run --device`; an argument of `evenstep.init` has priority.
        announced: The line that the launcher printed at start, so that rank 0 doesn't repeat it.
        rendezvous: Name of this rendezvous of several nodes; new after each restart.
        inject: Faults of `evenstep run --inject`.
        phase_timeouts: From `evenstep run --phase-timeout`.
        stamps_lines: Whether lines of log files begin with time, rank and step.
        measurement: How the run is measured (`evenstep bench`).
        node_timeout_s: From `evenstep run --node-timeout`.
    """

    launcher: str = ""
    store: str | None = None
    pages: Sequence[str] = ()
    device: str | None = None
    announced: str | None = None
    rendezvous: str = ""
    inject: str = ""
    phase_timeouts: str = ""
    stamps_lines: bool = False
    measurement: Measurement | None = None
    node_timeout_s: float = NODE_TIMEOUT_S

    @classmethod
    def parse(cls, variables: Mapping[str, str]) -> Settings:
        """Parse the variable from `variables`; the defaults if it is unset.

        Raises:
            ConfigurationError: The variable wasn't written by this version of evenstep.
        """
        text = variables.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
            given["pages"] = tuple(given.get("pages", ()))
            measured = given.pop("measurement", None)
            return cls(**given, measurement=None if measured is None else Measurement(**measured))
        except (ValueError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{VARIABLE}={text!r} was not written by this version of evenstep. Unset it: only evenstep's commands "
                f"set it, for their ranks."
            ) from None

    def variables(self) -> dict[str, str]:
        """The settings as a variable for the run's ranks."""
        default = asdict(Settings())
        given = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {VARIABLE: json.dumps(given)}
