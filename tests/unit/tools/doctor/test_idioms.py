"""Reading: idioms of well-known trainings that were once misunderstood, each beside the mistake that it resembles."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.examination import read

SCRIPT = '''\
import builtins
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Meters:
    """Passes batches of any loop on, and prints now and then."""

    def every(self, batches, header):
        for number, batch in enumerate(batches):
            yield batch
            if number % 10 == 0:
                print(header, number, time.time())


def quiet(is_first):
    shown = builtins.print

    def print(*args, **options):
        if is_first:
            shown(*args, **options)

    builtins.print = print


def save(*args):
    if dist.get_rank() == 0:
        torch.save(*args)


def train(model, optimizer, loader, meters, num_parts):
    for number, (x, y) in enumerate(meters.every(loader, "train")):
        is_last = number == len(loader) - 1
        steps = is_last or (number + 1) % num_parts == 0
        model.require_backward_grad_sync = steps
        loss = F.cross_entropy(model(x), y, ignore_index=-1) / num_parts
        loss.backward()
        if not steps:
            continue
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model, loader, meters):
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in meters.every(loader, "test"):
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    print("right", counts[0] / counts[1])


def main(train_set, test_set, build_model):
    dist.init_process_group("gloo")
    quiet(dist.get_rank() == 0)
    net = build_model()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    test_sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=32, sampler=test_sampler)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    meters = Meters()
    if dist.get_world_size() > 8:
        state = torch.load("last.pt", weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(10):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader, meters, 4)
        evaluate(net, test_loader, meters)
        scheduler.step()
        state = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        save(state, "last.pt")
        save(state, f"{epoch}.pt")
    dist.destroy_process_group()
'''

# A change, and what is found then: the rule, and a part of the line.
CHANGES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "clean": ("", "", []),
    "the evaluation's sampler pads, and not that of the training": (
        "shuffle=False, drop_last=True",
        "shuffle=False",
        [("EV105", "test_sampler = ")],
    ),
    "the training's loader behind a generator": (
        "DataLoader(train_set, batch_size=32, sampler=sampler)",
        "DataLoader(train_set, batch_size=32, shuffle=True)",
        [("EV101", "    loader = ")],
    ),
    "print is replaced by a function that nobody calls": (
        "    quiet(dist.get_rank() == 0)\n",
        "",
        [("EV201", "print(header"), ("EV201", 'print("right"')],
    ),
    "the wrapper's state, saved by a helper": (
        '"model": net.state_dict()',
        '"model": model.state_dict()',
        [("EV206", '"model": model.state_dict()')],
    ),
    "no scheduler in a state that is saved twice": (
        '            "scheduler": scheduler.state_dict(),\n',
        "",
        [("EV207", 'save(state, "last.pt")')],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_idiom_and_the_mistake_that_it_resembles(name: str, tmp_path: Path):
    before, after, expected = CHANGES[name]
    assert before in SCRIPT
    text = SCRIPT.replace(before, after) if before else SCRIPT
    script = tmp_path / "train.py"
    script.write_text(text)
    lines = text.splitlines()
    found = [(each.rule, lines[each.line - 1]) for each in read(script).findings]
    assert [rule for rule, _ in found] == [rule for rule, _ in expected], found
    for (_, line), (_, part) in zip(found, expected, strict=True):
        assert part in line
