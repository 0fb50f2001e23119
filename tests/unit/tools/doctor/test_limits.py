"""Where a rule ends: each case beside the one that it resembles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.rules import all_rules
from evenstep.tools.doctor.run.events import Event, Evidence
from evenstep.tools.doctor.verdict import watched
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.tree import Frame

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
PASS, NAN = "        model(x).sum().backward()\n", "        if torch.isnan(x).any():\n"
EPOCH = "    sampler.set_epoch(epoch)\n"
EVALUATION = """\
val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False{}))
correct = torch.zeros(())
for x, y in val_loader:
    correct += (model.module(x) == y).sum()
dist.all_reduce(correct)
"""
SPLIT = "dist.init_process_group('gloo')\na, b = random_split(data, [3, 4]{})\n"


@pytest.mark.parametrize(
    ("rule", "found", "clean"),
    [
        ("EV101", [(SAMPLER, NODE.format(""))], [(SAMPLER, NODE.format("num_replicas=LOCAL_WORLD, "))]),
        ("EV110", [(INIT, SPLIT.format(""))], [(INIT, SPLIT.format(", generator=own_generator"))]),
        ("EV302", [(END, f"a.to('cuda:1')\n{END}")], [(END, f"a.to('cuda:1')\nb.to('cuda:0')\n{END}")]),
        ("EV401", [(END, f"{MAIN}dist.barrier()\n{END}")], [(END, f"{MAIN}dist.barrier(mine)\n{END}")]),
        ("EV401", [(END, f"{MAIN}dist.reduce(x, 0)\n{END}")], [(END, f"{MAIN}dist.reduce(x, 0, op, group)\n{END}")]),
        ("EV402", [(PASS, f"{NAN}            continue\n{PASS}")], [(PASS, f"{NAN}            print(x)\n{PASS}")]),
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
        (
            "EV512",
            [(STEP, f"        scaler.step(optimizer)\n{STEP}")],
            [(STEP, "        scaler.step(optimizer)\n        other_optimizer.step()\n")],
        ),
        ("EV102", [(EPOCH, "")], [(EPOCH, ""), (SAMPLER, SAMPLER.replace("data", "data, shuffle=False"))]),
        ("EV306", [(END, f"torch.cuda.set_device(rank)\n{END}")], [(END, f"torch.cuda.set_device(local_rank)\n{END}")]),
        ("EV205", [(END, f"gzip.open('a.gz', 'wt')\n{END}")], [(END, f"gzip.open('a.gz', 'rt')\n{END}")]),
        ("EV105", [(END, EVALUATION.format("") + END)], [(END, EVALUATION.format(", drop_last=True") + END)]),
        ("EV403", [(STEP, f"{STEP}        dist.barrier()\n")], [(STEP, f"{STEP}    dist.barrier()\n")]),
    ],
)
def test_a_rule_and_its_limit(rule: str, found: list[tuple[str, str]], clean: list[tuple[str, str]], tmp_path: Path):
    assert rule in rules(tmp_path / "train.py", *found)
    assert rule not in rules(tmp_path / "train.py", *clean)


def test_a_word_in_a_docstring_or_comment_divides_no_data(tmp_path: Path):
    head = 'class Data(torch.utils.data.Dataset):\n    """Each {}."""\n    # {}\n'
    of_rank = head + "    def __getitem__(self, i):\n        return {}\n"
    plain = [
        ("sampler = DistributedSampler(data)", "{}data = Data()\nsampler = DistributedSampler(data)"),
        (", sampler=sampler", ""),
    ]
    for text, found in (
        (of_rank.format("rank has a shard", "rank", "1"), True),
        (of_rank.format("file", "file", "self.rank"), False),
    ):
        changes = [(plain[0][0], plain[0][1].format(text)), plain[1]]
        assert ("EV101" in rules(tmp_path / "train.py", *changes)) is found


HEADS = SCRIPT.partition("rank, local_rank")[0]
BLOCK = """\
model_{0} = DDP(nn.Linear(1, 1))
optimizer_{0} = torch.optim.Adam(model_{0}.parameters())
for x_{0} in DataLoader(data):
    if torch.isnan(x_{0}):
        continue
    model_{0}(x_{0}).backward()
    optimizer_{0}.step()
"""


def test_a_rule_takes_twice_as_long_for_twice_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Counted in what it asks: which frames a frame is in, and what an expression stands for."""
    asked: list[str] = []

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            asked.append(method.__name__)
            return method(*given)

        return ask

    counts = []
    for number in (12, 24):
        (tmp_path / "train.py").write_text(HEADS + "".join(BLOCK.format(each) for each in range(number)))
        script = Script(tmp_path / "train.py")
        with monkeypatch.context() as patched:
            patched.setattr(Frame, "outwards", counted(Frame.outwards))
            patched.setattr(Script, "values", counted(Script.values))
            found = list(all_rules()["EV402"].read(script))  # type: ignore[misc]
        assert len(found) == number
        counts.append(len(asked))
        asked.clear()
    assert counts[1] < 2.5 * counts[0]


# ---------------------------------------------------------------------- of a run

PATH = "/home/a/train.py"


def event(kind: str, *, line: int = 3, step: int = 0, **facts: Any) -> Event:
    return Event(kind, 0.0, step, [(PATH, line)], facts)


def seen(*ranks: list[Event]) -> set[str]:
    wrapped = event("wrapped", wrapper="torch", num_bytes=4)
    evidence = Evidence([[wrapped, *events] for events in ranks])
    received: Watched = watched(evidence, script="train.py", directory="/home/a")
    return {each.rule for each in received.findings}


def epoch(samples: str, **facts: Any) -> list[Event]:
    known = {"loader": 1, "iteration": 0}
    batches = [event("batch", rows=[each], **known) for each in samples]
    return [
        event("iterate", **known, **facts),
        *batches,
        event("stepped"),
        event("iterated", **known, num_batches=9, cut=True),
    ]


@pytest.mark.parametrize(
    ("mine", "other", "is_found"), [("abcd", "abcd", True), ("abc", "abc", False), ("abcd", "efgh", False)]
)
def test_few_samples_say_nothing(mine: str, other: str, is_found: bool):
    assert ("EV101" in seen(epoch(mine), epoch(other))) is is_found


@pytest.mark.parametrize(("synced", "is_found"), [((True, True), True), ((False, True), False)])
def test_an_exchange_in_each_pass(synced: tuple[bool, bool], is_found: bool):
    events = []
    for step in range(4):
        events += [event("backward", step=step, wrapped=True, synced=each) for each in synced]
        events.append(event("stepped", step=step))
    assert ("EV501" in seen(events, events)) is is_found


def test_a_checkpoint_is_no_other_file():
    both = [event("write", path="/a/model.pt"), event("save", path="/a/model.pt")]
    assert seen(both, both) == {"EV204"}
    assert seen(both[:1], both[:1]) == {"EV205"}
    assert seen(both, [event("save", path="/a/other.pt")]) == set()


LOOKS = [f"{part}{sample}" for sample in range(3) for part in "xy"]


@pytest.mark.parametrize(
    ("theirs", "is_found"),
    [
        (LOOKS, False),
        ([f"other {each}" for each in LOOKS], True),
        ([f"noisy {each}" if each[0] == "x" else each for each in LOOKS], False),  # augmented, of the same label
        ([f"other {each}" if each != "y1" else each for each in LOOKS], True),  # of two other samples one label
        ([f"other {each}" for each in LOOKS[:2]] + LOOKS[2:], False),
        (LOOKS[:4], False),
    ],
)
def test_data_that_differ_between_ranks(theirs: list[str], is_found: bool):
    facts = {"is_distributed": True}
    assert ("EV110" in seen(epoch("abcd", looks=LOOKS, **facts), epoch("efgh", looks=theirs, **facts))) is is_found
    assert "EV110" not in seen(epoch("abcd", looks=LOOKS), epoch("efgh", looks=theirs))


def trained(first: str, second: str, *, wrapped: bool = False, apart: str = "") -> list[Event]:
    looks = [
        event("parameters", line=5, model=0, when=when, digests={"w": digest, "frozen": "f"})
        for when, digest in ((0, first), (1, second))
    ]
    passes = [event("forward", line=5, grad=True, wrapped=wrapped, rows=[]), event("backward", line=6, wrapped=wrapped)]
    return [looks[0], *passes, event("stepped"), *[event("apart", what=apart)] * bool(apart), looks[1]]


def test_parameters_that_differ_between_ranks():
    same = trained("a", "b")
    assert not seen(same, same) & {"EV606"}
    assert "EV606" in seen(same, trained("a", "c")), "there is a wrapper, and passes go around it"
    through = trained("a", "b", wrapped=True)
    assert "EV606" in seen(through, trained("a", "c", wrapped=True)), "weights are changed behind it"
    assert not seen(trained("a", "a"), trained("c", "c")) & {"EV606"}, "nothing is trained"
    of_groups = [trained("a", each, apart="new_group") for each in "bc"]
    assert not seen(*of_groups) & {"EV606"}
