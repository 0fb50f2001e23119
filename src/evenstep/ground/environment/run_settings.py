"""What evenstep's commands hand on to the ranks that they start, in one variable. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from evenstep.errors import ConfigurationError

VARIABLE = "EVENSTEP_SETTINGS"
NODE_TIMEOUT_S = 30.0  # another node, or a peer of a parameter server, may be silent for so long


@dataclass(frozen=True)
class Measurement:
    """The settings of a run that `evenstep bench` measures.

    Attributes:
        directory: Where every rank leaves its record.
        num_steps: Optimizer steps that are counted, after some that aren't; then the run ends, with status 0.
        global_batch_size: Samples of a step on all ranks together, instead of what the script says; None: as it says.
        growth: What is measured in other units than samples (`max_tokens`) is multiplied by this.
        watches_losses: Whether ranks record losses, and begin with a seed.
    """

    directory: str
    num_steps: int = 1
    global_batch_size: int | None = None
    growth: int = 1
    watches_losses: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings of a run. What no command has set is as in a run without.

    Attributes:
        launcher: Which of ours started the ranks: "run", "launch"; "": none.
        store: Where the file can be opened in which the ranks of one node meet.
        pages: Where the heartbeat pages of the node's ranks can be opened, by local rank.
        device: What `evenstep run --device` said; an argument of `evenstep.init` beats it.
        announced: The line that the launcher printed at start, so that rank 0 doesn't repeat it.
        rendezvous: Name of this rendezvous of several nodes: another one after a restart.
        inject: Faults of `evenstep run --inject`.
        phase_timeouts: What `evenstep run --phase-timeout` said.
        stamps_lines: Whether lines of log files begin with time, rank and step.
        measurement: How the run is measured (`evenstep bench`).
        node_timeout_s: What `evenstep run --node-timeout` said.
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
        """Read what `variables` has written; all as it is by default without.

        Raises:
            ConfigurationError: Something else has written it.
        """
        text = variables.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
            given["pages"] = tuple(given.get("pages", ()))
            measured = given.pop("measurement", None)
            return cls(**given, measurement=None if measured is None else Measurement(**measured))
        except (ValueError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{VARIABLE}={text!r} was not written by this version of evenstep. Its commands set it for the ranks "
                f"that they start: unset it."
            ) from None

    def variables(self) -> dict[str, str]:
        """The variable of the run's ranks."""
        default = asdict(Settings())
        given = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {VARIABLE: json.dumps(given)}
