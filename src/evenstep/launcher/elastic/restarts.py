"""What a run remembers between attempts: how many restarts were in vain, and how nodes agree on that."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch.distributed import Store


@dataclass(frozen=True)
class Standing:
    """What a node knows of a run's restarts.

    Attributes:
        num_restarts: How many there were.
        num_in_vain: As of `RestartLimit`.
        saved_step: Of the newest checkpoint of this run; None: none yet.
        has_saved: A checkpoint was committed since the last restart, before nodes came or went without one.
    """

    num_restarts: int
    num_in_vain: int
    saved_step: int | None
    has_saved: bool

    @staticmethod
    def of_all_nodes(each: Iterable[Standing]) -> Standing:
        """The standing of the run, from those of its nodes; nodes that joined later know less. Pure."""
        nodes = list(each)
        most = max(node.num_restarts for node in nodes)
        steps = [node.saved_step for node in nodes if node.saved_step is not None]
        return Standing(
            most,
            min(node.num_in_vain for node in nodes if node.num_restarts == most),
            max(steps, default=None),
            any(node.has_saved for node in nodes),
        )


class RestartLimit:
    """Ends a run whose restarts make no progress. Pure.

    Only for runs with a `Checkpointer`: without checkpoints nothing shows whether a run makes progress.

    Attributes:
        num_in_vain: Restarts since the last checkpoint was committed.
        saved_step: Of the newest checkpoint of this run; None: none yet.
    """

    MOST_IN_VAIN = 3

    def __init__(self) -> None:
        self.num_in_vain = 0
        self.saved_step: int | None = None
        self._has_saved = False  # since the last restart

    def note(self, *, attempt: int, saves: bool, saved_step: int | None) -> None:
        """Count an attempt that has failed.

        Args:
            attempt: 0 for the first.
            saves: It had a `Checkpointer`.
            saved_step: Of the last checkpoint that it has committed; None: none.
        """
        self.note_saved(saved_step)
        if saves and attempt > 0 and not self._has_saved:
            self.num_in_vain += 1
        self._has_saved = False

    def note_saved(self, saved_step: int | None) -> None:
        """Remember what an attempt has committed, if anything, before it goes on with other nodes."""
        if saved_step is not None:
            self.num_in_vain, self.saved_step, self._has_saved = 0, saved_step, True

    def standing(self, *, num_restarts: int) -> Standing:
        """What this node knows, for the others."""
        return Standing(num_restarts, self.num_in_vain, self.saved_step, self._has_saved)

    def adopt(self, standing: Standing) -> None:
        """Continue from the standing of all nodes."""
        self.saved_step, self._has_saved = standing.saved_step, standing.has_saved
        self.num_in_vain = 0 if standing.has_saved else standing.num_in_vain

    @property
    def is_reached(self) -> bool:
        """Whether one more restart would be one too many."""
        return self.num_in_vain >= self.MOST_IN_VAIN


def compare_standings(store: Store, own: Standing, *, node_rank: int, num_nodes: int) -> Standing:
    """How the run stands as all nodes together know. Collective over nodes; all return the same.

    Args:
        store: Of this rendezvous alone.
        own: What this node knows.
        node_rank: This node.
        num_nodes: All nodes of this rendezvous.
    """
    store.set(f"evenstep/standing-{node_rank}", json.dumps(asdict(own)))
    standings = (store.get(f"evenstep/standing-{node}") for node in range(num_nodes))
    return Standing.of_all_nodes(Standing(**json.loads(text)) for text in standings)
