"""From which step nodes with local tiers go on: a table of what they hold, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstep.checkpoint.format.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.load.recovery import Holding, plan_recovery
from evenstep.checkpoint.lock import Place


def file_of(node: int) -> str:
    return f"model-n{node}.safetensors"


def generation(step: int, on: dict[int, list[int]], *, time: float = 0.0) -> Manifest:
    """Of one tensor; `on`: by its parts' first elements, which nodes have written each of them, canonical one first."""
    bounds = [*on, 12]
    parts, copies = [], []
    for (begin, nodes), end in zip(on.items(), bounds[1:], strict=True):
        first, *others = (Part(file_of(node), "w", begin, end - begin, begin) for node in nodes)
        parts.append(first)
        copies += others
    entry = ObjectEntry("Linear", {}, {"w": TensorEntry("float32", (12,), tuple(parts), tuple(copies))})
    files = {file_of(node): FileEntry(200, 64, 9, node) for nodes in on.values() for node in nodes}
    return Manifest(step, 3, time, {}, {}, {"model": entry}, files)


REPLICAS = {0: [0, 1, 2]}
DIVIDED = {0: [0], 4: [1], 8: [2]}
HYBRID = {0: [0, 2], 6: [1, 3]}  # divided over two nodes, twice


def held(place: tuple[int, int, int], on: dict[int, list[int]], nodes, *, without=(), time=0.0) -> list[Holding]:
    """What `nodes` hold of a generation: each its own file, but for those in `without`."""
    manifest = generation(place[0], on, time=time)
    own = {node: frozenset({file_of(node)} & manifest.files.keys()) for node in nodes}
    return [
        Holding(node, Place(*place).folder, manifest, frozenset() if node in without else own[node]) for node in nodes
    ]


NEW, OLD = (60, 1, 3), (40, 1, 2)

# What nodes hold; resumes; the durable step; the step that follows, or None for the durable checkpoint.
CASES = {
    "nothing is there": ([], [], None, None),
    "all are there": (held(NEW, REPLICAS, [0, 1, 2]), [], 20, 60),
    "replicas, a node lost": (held(NEW, REPLICAS, [1, 2]), [], 20, 60),
    "replicas, all but one lost": (held(NEW, REPLICAS, [2]), [], 20, 60),
    "the whole divided state": (held(NEW, DIVIDED, [0, 1, 2]), [], 20, 60),
    "divided, a node lost": (held(NEW, DIVIDED, [0, 2]) + held(OLD, DIVIDED, [0, 2]), [], 20, None),
    "divided, a node's file lost": (
        held(NEW, DIVIDED, [0, 1, 2], without=[1]) + held(OLD, DIVIDED, [0, 1, 2]), [], 20, 40,
    ),
    "divided, and older on all": (held(NEW, DIVIDED, [0, 1]) + held(OLD, DIVIDED, [0, 1, 2]), [], 20, 40),
    "older, but the durable one is newer": (held(NEW, DIVIDED, [0, 1]) + held(OLD, DIVIDED, [0, 1, 2]), [], 50, None),
    "hybrid, both of one half lost": (held(NEW, HYBRID, [0, 2]), [], None, None),
    "hybrid, one of each half lost": (held(NEW, HYBRID, [1, 2]), [], None, 60),
    "2 x 2 ranks are 1 x 4: replicas": (held(NEW, {0: [0, 1]}, [0]), [], 20, 60),
    "2 x 2 ranks are 1 x 4: divided": (held(NEW, {0: [0], 6: [1]}, [0]), [], 20, None),
    "the durable one is newer": (held(NEW, REPLICAS, [0, 1, 2]), [], 61, None),
    "the durable one is as new": (held(NEW, REPLICAS, [0, 1, 2]), [], 60, 60),
    "no durable one": (held(NEW, DIVIDED, [0, 1, 2]), [], None, 60),
    "step 0": (held((0, 1, 1), REPLICAS, [0]), [], None, 0),
    "manifests that differ": (
        held(NEW, REPLICAS, [0]) + held(NEW, REPLICAS, [1], time=9.0) + held(OLD, REPLICAS, [0]), [], 20, 40,
    ),
    "an attempt went on from before it": (held(NEW, REPLICAS, [0]) + held(OLD, REPLICAS, [0]), [(2, 40)], 20, 40),
    "an attempt went on from it": (held(NEW, REPLICAS, [0]), [(2, 60)], 20, 60),
    "its own attempt went on from before it": (held(NEW, REPLICAS, [0]), [(1, 40)], 20, 60),
    "a later attempt's of the same step": (
        held(NEW, REPLICAS, [0]) + held((60, 3, 1), {0: [1]}, [1]), [(2, 40), (3, 50)], 20, 60,
    ),
    "void, for the last of three attempts began again": (held((60, 2, 1), REPLICAS, [0]), [(2, 40), (3, 20)], 20, None),
    "somebody else's folder": ([replace(held(NEW, REPLICAS, [0])[0], folder="step-60")], [], None, None),
    "a folder of an unusual name": ([replace(held(NEW, REPLICAS, [0])[0], folder="step-00000060-00001-3")], [], 20, 60),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_newest_step_of_which_the_nodes_hold_every_part(case):
    holdings, resumes, durable_step, expected = CASES[case]
    for given in (holdings, holdings[::-1]):
        found = plan_recovery(given, resumes, durable_step)
        assert (None if found is None else found.manifest.step) == expected
        if found is None:
            continue
        there = {(each.folder, each.node, file) for each in holdings for file in each.files}
        assert {(found.folder, node, file) for file, node in found.holders.items()} <= there
        chosen = found.manifest.choose(found.holders)
        assert chosen is not None
        parts = chosen.objects["model"].tensors["w"].parts
        assert {part.file for part in parts} <= found.holders.keys()
        assert sum(part.numel for part in parts) == 12


def test_of_one_step_that_of_the_last_attempt_counts():
    holdings = held((60, 1, 9), REPLICAS, [0]) + held((60, 2, 1), REPLICAS, [0])
    found = plan_recovery(holdings, [(2, 60)], None)
    assert found is not None
    assert found.folder == Place(60, 2, 1).folder
