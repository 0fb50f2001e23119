"""Where a rule ends: each case beside the one that it resembles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.run.events import Event, Evidence
from evenstep.tools.doctor.verdict import watched

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, random_split

dist.init_process_group("gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""
END = "dist.destroy_process_group()\n"


def rules(path: Path, *changes: tuple[str, str]) -> set[str]:
    text = SCRIPT
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return {each.rule for each in read(path).findings}


STEP, SAVE = "        optimizer.step()\n", "torch.save(model.module.state_dict(), {})\n"
SAMPLER = "sampler = DistributedSampler(data)"
NODE = "LOCAL_WORLD = torch.cuda.device_count()\nsampler = DistributedSampler(data, {}rank=local_rank)"
INIT, MAIN, PT = 'dist.init_process_group("gloo")\n', "if rank == 0:\n    ", "'a.pt'"
EVALUATION = """\
val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False{}))
correct = torch.zeros(())
for x, y in val_loader:
    correct += (model.module(x) == y).sum()
dist.all_reduce(correct)
"""
SEEDS = "rank, own = dist.get_rank(), torch.Generator()\nown.manual_seed(1)\ntorch.manual_seed(2 + {})\n"
SPLIT = "dist.init_process_group('gloo')\na, b = random_split(data, [3, 4]{})\n"


@pytest.mark.parametrize(
    ("rule", "found", "clean"),
    [
        ("EV101", [(SAMPLER, NODE.format(""))], [(SAMPLER, NODE.format("num_replicas=LOCAL_WORLD, "))]),
        ("EV110", [(INIT, SPLIT.format(""))], [(INIT, SPLIT.format(", generator=own_generator"))]),
        ("EV110", [(INIT, SEEDS.format("rank") + SPLIT.format(""))], [(INIT, SEEDS.format("1") + SPLIT.format(""))]),
        ("EV401", [(END, f"{MAIN}dist.barrier()\n{END}")], [(END, f"{MAIN}dist.barrier(mine)\n{END}")]),
        ("EV401", [(END, f"{MAIN}dist.reduce(x, 0)\n{END}")], [(END, f"{MAIN}dist.reduce(x, 0, op, group)\n{END}")]),
        ("EV204", [(END, SAVE.format("'a.pt'") + END)], [(END, SAVE.format("f'{rank}.pt'") + END)]),
        (
            "EV204",
            [(END, f"if local_rank == 0:\n    {SAVE.format(PT)}{END}")],
            [(END, f"if local_rank == 0 and rank == 0:\n    {SAVE.format(PT)}{END}")],
        ),
        (
            "EV512",
            [(STEP, f"        scaler.step(optimizer)\n{STEP}")],
            [(STEP, f"        if scaler:\n            scaler.step(optimizer)\n        else:\n    {STEP}")],
        ),
        ("EV205", [(END, f"gzip.open('a.gz', 'wt')\n{END}")], [(END, f"gzip.open('a.gz', 'rt')\n{END}")]),
        ("EV105", [(END, EVALUATION.format("") + END)], [(END, EVALUATION.format(", drop_last=True") + END)]),
    ],
)
def test_a_rule_and_its_limit(rule: str, found: list[tuple[str, str]], clean: list[tuple[str, str]], tmp_path: Path):
    assert rule in rules(tmp_path / "train.py", *found)
    assert rule not in rules(tmp_path / "train.py", *clean)


# ---------------------------------------------------------------------- of a run

PATH = "/home/a/train.py"


def event(kind: str, *, line: int = 3, step: int = 0, **facts: Any) -> Event:
    return Event(kind, 0.0, step, [(PATH, line)], facts)


def evidence_of(*ranks: list[Event]) -> dict[str, str]:
    wrapped = event("wrapped", wrapper="torch", num_bytes=4)
    evidence = Evidence([[wrapped, *events] for events in ranks])
    received: Watched = watched(evidence, script="train.py", directory="/home/a")
    return {each.rule: each.evidence for each in received.findings}


def seen(*ranks: list[Event]) -> set[str]:
    return {*evidence_of(*ranks)}


def epoch(samples: str, **facts: Any) -> list[Event]:
    known = {"loader": 1, "iteration": 0}
    batches = [event("batch", rows=[each], **known) for each in samples]
    return [
        event("iterate", **known, **facts),
        *batches,
        event("stepped"),
        event("iterated", **known, num_batches=9, cut=True),
    ]


LOOKS = [f"{part}{sample}" for sample in range(3) for part in "xy"]


@pytest.mark.parametrize(
    ("theirs", "is_found"),
    [
        (LOOKS, False),
        ([f"other {each}" for each in LOOKS], True),
        ([f"noisy {each}" if each[0] == "x" else each for each in LOOKS], False),  # augmented, of the same label
    ],
)
def test_data_that_differ_between_ranks(theirs: list[str], is_found: bool):
    facts = {"is_distributed": True}
    assert ("EV110" in seen(epoch("abcd", looks=LOOKS, **facts), epoch("efgh", looks=theirs, **facts))) is is_found
    assert "EV110" not in seen(epoch("abcd", looks=LOOKS), epoch("efgh", looks=theirs))


def trained(first: str, second: str, *, wrapped: bool = False, synced: bool = False, apart: str = "") -> list[Event]:
    looks = [
        event("parameters", line=5, model=0, when=when, digests={"w": digest, "frozen": "f"})
        for when, digest in ((0, first), (1, second))
    ]
    forward = event("forward", line=5, grad=True, wrapped=wrapped, rows=[])
    passes = [forward, event("backward", line=6, wrapped=wrapped, synced=synced)]
    return [looks[0], *passes, event("stepped"), *[event("apart", what=apart)] * bool(apart), looks[1]]


def test_parameters_that_differ_between_ranks():
    same = trained("a", "b")
    assert not seen(same, same) & {"EV606"}
    assert "calls the model without its wrapper" in evidence_of(same, trained("a", "c"))["EV606"]
    through = trained("a", "b", wrapped=True)
    assert "under no_sync()" in evidence_of(through, trained("a", "c", wrapped=True))["EV606"]
    through, other = (trained("a", each, wrapped=True, synced=True) for each in "bc")
    assert evidence_of(through, other)["EV606"].endswith("(w, for one)"), "weights are changed behind it"
    assert not seen(trained("a", "a"), trained("c", "c")) & {"EV606"}, "nothing is trained"
    of_groups = [trained("a", each, apart="new_group") for each in "bc"]
    assert not seen(*of_groups) & {"EV606"}
