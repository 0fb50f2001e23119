"""What the nodes of a run agree on when an attempt has ended: of what it failed, and what it has saved.

All nodes have the same answers, so each decides by itself, and all alike, whether the run is restarted (`restarts`). A
run of one node has them without asking anybody.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from evenstep.launcher.elastic.heartbeat import OtherNodes
from evenstep.launcher.failure.report import Failure, RemoteFailure, state_of, status_of, summary_of

_POLL_S = 0.02


@dataclass(frozen=True)
class Saved:
    """What an attempt has saved, as far as one node knows, or all nodes together.

    Attributes:
        has_checkpointer: There was a `Checkpointer`.
        step: Of the last checkpoint that was committed; None: none.
    """

    has_checkpointer: bool
    step: int | None

    @staticmethod
    def of_all_nodes(each: Iterable[Saved]) -> Saved:
        """What all nodes together have saved. Pure."""
        nodes = list(each)
        steps = [node.step for node in nodes if node.step is not None]
        return Saved(any(node.has_checkpointer for node in nodes), max(steps, default=None))


def agree_on_saved(others: OtherNodes, own: Saved, *, longest_s: float) -> Saved:
    """What all nodes have saved, once their attempts have ended too; without nodes that are lost or too late.

    Args:
        others: The other nodes.
        own: What this one has saved.
        longest_s: How long to wait for them.
    """
    nodes = [own]
    for text in others.exchange(json.dumps(asdict(own)), longest_s=longest_s):
        with contextlib.suppress(ValueError, TypeError):
            nodes.append(Saved(**json.loads(text)))
    return Saved.of_all_nodes(nodes)


def agree_on_cause(
    others: OtherNodes, failure: Failure | None, remote: RemoteFailure | None, *, grace_s: float
) -> RemoteFailure | None:
    """Publish a failure that began here; else, after secondary failures only, wait for one published elsewhere.

    Args:
        others: The other nodes.
        failure: Of this node's ranks, all of which have ended; None: none failed.
        remote: What was known of the other nodes when it was noticed; None: nothing.
        grace_s: How long to wait.

    Returns:
        The failure on another node that is the cause; None: it isn't known, or happened here.
    """
    if remote is not None or failure is None:
        return remote
    if not failure.only_secondary:
        others.publish_failure(summary_of(failure), status_of(failure), state=state_of(failure))
        return None
    deadline = time.monotonic() + grace_s
    while (published := others.look()) is None and time.monotonic() < deadline:
        if others.new_node_waits:
            return None
        time.sleep(_POLL_S)
    return published
