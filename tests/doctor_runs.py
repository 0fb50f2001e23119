"""Training scripts that `evenstep doctor` runs: one without a mistake, and the same with one planted in each."""

from __future__ import annotations

from collections.abc import Sequence

CLEAN = """
import os

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data
        self.draw = numpy.random.default_rng(int(os.environ["RANK"]))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x, y


class Stream(IterableDataset):
    def __init__(self, data, rank, size):
        self.data, self.rank, self.size = data, rank, size

    def __iter__(self):
        for index in range(self.rank, len(self.data), self.size):
            yield self.data[index]


def train(rank, size):
    torch.manual_seed(0)
    train_set = Noisy(TensorDataset(torch.randn(256, 20), torch.randint(3, (256,))))
    val_set = TensorDataset(torch.randn(64, 20), torch.randint(3, (64,)))
    torch.manual_seed(100 + rank)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))
    net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for number, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        correct = torch.zeros(())
        with torch.no_grad():
            for x, y in val_loader:
                correct += (model(x).argmax(1) == y).sum()
        dist.all_reduce(correct)
        if rank == 0:
            print("epoch", epoch, "correct", correct.item())
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "model.pt")


def main():
    dist.init_process_group("gloo")
    # torch's model ends with this function: it must not outlive its process group.
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


main()
"""

_LOADER = "DataLoader(train_set, batch_size=16, sampler=sampler)"
_LOSS = """            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
"""
_ACCUMULATED = """            {sync}
                loss = F.cross_entropy(model(x), y){divided}
                loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
"""


def _changed(*changes: Sequence[str]) -> str:
    text = CLEAN
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def _accumulated(
    sync: str = "with model.no_sync() if number % 2 == 0 else torch.enable_grad():", divided: str = " / 2"
):
    return (_LOSS, _ACCUMULATED.format(sync=sync, divided=divided))


_SPAWNED = (
    (
        'def main():\n    dist.init_process_group("gloo")\n',
        'def main(rank, size):\n    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29555"\n'
        '    dist.init_process_group("gloo", rank=rank, world_size=size)\n',
    ),
    ("\n\nmain()\n", '\n\nif __name__ == "__main__":\n    torch.multiprocessing.spawn(main, args=(2,), nprocs=2)\n'),
)

# By name: the script, and the findings of its run as (rule, text of the line).
FOUND: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "clean": (CLEAN, []),
    "clean_accumulation": (_changed(_accumulated()), []),
    "clean_stream": (_changed((_LOADER, "DataLoader(Stream(train_set, rank, size), batch_size=16)")), []),
    "clean_look": (
        _changed(("    for epoch in range(4):", "    shown = next(iter(loader))\n    for epoch in range(4):")),
        [],
    ),
    "clean_workers": (_changed((_LOADER, "DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=2)")), []),
    "clean_unused": (
        _changed(
            ("DDP(net)", "DDP(net, find_unused_parameters=True)"),
            ("    net = nn.Sequential(", "    net = Part("),
            (
                "def train(rank, size):",
                "class Part(nn.Sequential):\n    def __init__(self, *parts):\n        super().__init__(*parts)\n"
                "        self.extra = nn.Linear(2, 2)\n\n    def forward(self, x):\n"
                "        for part in list(self)[:4]:\n"
                "            x = part(x)\n        return x\n\n\ndef train(rank, size):",
            ),
        ),
        [],
    ),
    "no_sampler": (
        _changed((_LOADER, "DataLoader(train_set, batch_size=16, shuffle=True)")),
        [("EV101", "loader = Data")],
    ),
    "no_sampler_same_seed": (
        _changed(
            (_LOADER, "DataLoader(train_set, batch_size=16, shuffle=True)"), ("    torch.manual_seed(100 + rank)\n", "")
        ),
        [("EV101", "loader = Data")],
    ),
    "no_set_epoch": (_changed(("        sampler.set_epoch(epoch)\n", "")), [("EV102", "in enumerate(loader)")]),
    "padded": (
        _changed(("torch.randn(64, 20), torch.randint(3, (64,))", "torch.randn(63, 20), torch.randint(3, (63,))")),
        [("EV105", "val_loader = ")],
    ),
    "stream": (_changed((_LOADER, "DataLoader(Stream(train_set, 0, 1), batch_size=16)")), [("EV106", "loader = Data")]),
    "same_noise": (
        _changed(
            ("        return x, y\n", "        return x + torch.randn(20), y\n"),
            ("    torch.manual_seed(100 + rank)\n", ""),
        ),
        [("EV107", "loader = Data")],
    ),
    "same_workers": (
        _changed(
            ("        return x, y\n", "        return x + self.draw.normal(size=20).astype('f'), y\n"),
            (_LOADER, "DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=2)"),
        ),
        [("EV108", "loader = Data")],
    ),
    "lengths": (
        _changed((_LOADER, "DataLoader(train_set, batch_size=16, sampler=range(rank * 100, 160 + rank * 36))")),
        [("EV109", "loader = Data")],
    ),
    "saves": (_changed(("            torch.save(", "        torch.save(")), [("EV204", "torch.save(")]),
    "writes": (
        _changed(
            (
                "        model.eval()\n",
                "        model.eval()\n        with open('log.txt', 'a') as file:\n            file.write('x')\n",
            )
        ),
        [("EV205", "open('log.txt'")],
    ),
    "prefix": (_changed(("model.module.state_dict()", "model.state_dict()")), [("EV206", "torch.save(")]),
    "no_sync": (_changed(_accumulated(sync="if True:")), [("EV501", "loss.backward()")]),
    "divisor": (_changed(_accumulated(divided=" / 4")), [("EV502", "loss.backward()")]),
    "no_divisor": (_changed(_accumulated(divided="")), [("EV502", "loss.backward()")]),
    "divided_by_ranks": (
        _changed(("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) / size")),
        [("EV502", "loss.backward()")],
    ),
    "replaced": (
        _changed(
            (
                "    model = DDP(net)\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
                "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
                "    net[3] = nn.Linear(32, 3)\n    model = DDP(net)\n",
            )
        ),
        [("EV504", "optimizer.step()")],
    ),
    "tokens": (
        _changed(
            (
                "F.cross_entropy(model(x), y)",
                "F.cross_entropy(model(x), y.masked_fill(torch.rand(len(y)) < 0.2 + 0.5 * rank, -100))",
            )
        ),
        [("EV505", "F.cross_entropy(")],
    ),
    "whole_labels": (
        _changed(("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y, ignore_index=IGNORED)")).replace(
            "def main():\n", "IGNORED = -100\n\n\ndef main():\n"
        ),
        [],
    ),
    "few_rows": (_changed((_LOADER, _LOADER.replace("16", "4"))), [("EV507", "model(x), y")]),
    "no_wrapper": (
        _changed(("    model = DDP(net)\n", "    model = net\n"), ("model.module.state_dict()", "model.state_dict()")),
        [("EV606", "loss.backward()")],
    ),
    "around": (
        _changed(("F.cross_entropy(model(x), y)", "F.cross_entropy(model.module(x), y)")),
        [("EV606", "F.cross_entropy(model.module(x), y)")],
    ),
    "drifts": (
        _changed(
            (
                "            scheduler.step()\n",
                "            scheduler.step()\n            net[0].weight.data.mul_(1 - rank)\n",
            )
        ),
        [("EV606", "loss.backward()")],
    ),
    "clean_groups": (
        _changed(
            ("    model = DDP(net)\n", "    model = net\n    groups = [dist.new_group([0]), dist.new_group([1])]\n"),
            ("model.module.state_dict()", "model.state_dict()"),
        ),
        [],
    ),
    "clean_averaged": (
        _changed(
            (
                "    model = DDP(net)\n",
                "    model = net\n    for each in net.parameters():\n        dist.broadcast(each.data, 0)\n",
            ),
            ("model.module.state_dict()", "model.state_dict()"),
            (
                "            loss.backward()\n",
                "            loss.backward()\n            for each in net.parameters():\n"
                "                dist.all_reduce(each.grad.div_(size))\n",
            ),
        ),
        [],
    ),
    "other_data": (
        _changed(
            ("    torch.manual_seed(0)\n", "    torch.manual_seed(rank)\n"),
            ("torch.randint(3, (256,))", "torch.rand(256) + 0"),
        ).replace("cross_entropy(model(x), y)", "cross_entropy(model(x), y.long())"),
        [("EV110", "loader = Data"), ("EV110", "val_loader = ")],
    ),
    "port": (
        _changed(("def main():\n", "def main():\n    os.environ['MASTER_PORT'] = '29511'\n")),
        [("EV601", "init_process_group(")],
    ),
    "no_destroy": (_changed(("    dist.destroy_process_group()\n", "")), [("EV604", "init_process_group(")]),
    "spawned_file": (
        _changed(
            (
                _SPAWNED[0][0],
                "def main(rank, size, meeting):\n"
                "    dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=rank, world_size=size)\n",
            ),
            (
                _SPAWNED[1][0],
                '\n\nif __name__ == "__main__":\n    import tempfile\n    meeting = tempfile.mktemp()\n'
                "    torch.multiprocessing.spawn(main, args=(2, meeting), nprocs=2)\n",
            ),
        ),
        [],
    ),
    "spawned": (_changed(*_SPAWNED), [("EV601", "init_process_group(")]),
}
# These would hang.
HANGS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "guarded_all_reduce": (
        _changed(
            (
                "        dist.all_reduce(correct)\n        if rank == 0:\n",
                "        if rank == 0:\n            dist.all_reduce(correct)\n",
            )
        ),
        [("EV401", "dist.all_reduce(")],
    ),
    "model_on_one": (
        _changed(
            ("        with torch.no_grad():\n", "        if rank == 0:\n          with torch.no_grad():\n"),
            ("        dist.all_reduce(correct)\n", ""),
        ),
        [("EV404", "correct += (model")],
    ),
    "stream_lengths": (
        _changed((_LOADER, "DataLoader(Stream(train_set, rank * 128, 1 + rank * 5), batch_size=16)")),
        [("EV109", "loader = Data")],
    ),
    "sleeps": (
        _changed(
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n            if rank == 1 and number == 3:\n"
                "                import time\n                time.sleep(1000)\n",
            )
        ),
        [("EV402", "loss.backward()")],
    ),
}
