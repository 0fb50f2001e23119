"""One training program, written for several libraries: how far does each end from what one process computes?

    make bench NAME=libraries

Each function below is the loop that a library's own documentation shows. Each runs on two CPU ranks. "One process" is
the same loop without any library, with the global batch size. The order of the samples is fixed, except for "resume".
There, a run that is stopped in the middle of its second epoch and started again is compared with one that isn't.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_EPOCHS = 4
SAVED = "saved"  # where a run that is stopped leaves what the next one starts from


@dataclass(frozen=True)
class Case:
    """What a program trains on.

    Attributes:
        num_samples: Of the data set.
        batch_size: Samples of a backward pass on one rank.
        parts: Backward passes of a step.
        is_shuffled: Each epoch has a random order.
        calls_twice: The loss needs two outputs of the same model.
        stops_after: Backward passes of a rank after which it saves and ends; None: it doesn't.
        resumes: It starts from what was saved.
    """

    num_samples: int = 48
    batch_size: int = 8
    parts: int = 1
    is_shuffled: bool = False
    calls_twice: bool = False
    stops_after: int | None = None
    resumes: bool = False

    @property
    def data(self) -> TensorDataset:
        """[num_samples, 8] inputs and [num_samples] classes, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.num_samples, 8, generator=generator)
        return TensorDataset(inputs, inputs[:, :3].argmax(1))

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """A mean over the samples of a batch."""
        outputs = model(x)
        if not self.calls_twice:
            return nn.functional.cross_entropy(outputs, y)
        similarity = nn.functional.cosine_similarity(outputs, model(x.flip(1)))
        return nn.functional.mse_loss(similarity, (y == 0).float())


CASES = {
    "uneven batches": Case(num_samples=51),
    "accumulation": Case(num_samples=56, batch_size=4, parts=2),
    "an encoder used twice": Case(calls_twice=True),
    "resume": Case(is_shuffled=True),
}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train_alone(case: Case) -> nn.Module:
    """One process, with the global batch."""
    model, optimizer = build()
    for _ in range(NUM_EPOCHS):
        for x, y in DataLoader(case.data, case.batch_size * case.parts * 2):
            case.loss(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def train_torch(case: Case) -> nn.Module:
    """torch's DistributedDataParallel, with `no_sync` and a loss that is divided by the parts."""
    dist.init_process_group("gloo")
    module, optimizer = build()
    model = DistributedDataParallel(module)
    sampler: DistributedSampler[Any] = DistributedSampler(case.data, shuffle=case.is_shuffled)
    loader = DataLoader(case.data, case.batch_size, sampler=sampler)
    done = begun = 0
    if case.resumes:
        state = torch.load(SAVED)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begun = state["done"]
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            done += 1
            if done <= begun:
                continue
            is_last = number % case.parts == 0 or number == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                (case.loss(model, x, y) / case.parts).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            if done == case.stops_after:
                if dist.get_rank() == 0:
                    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, SAVED)
                return module
    return module


def train_accelerate(case: Case) -> nn.Module:
    """accelerate, with `accumulate`, `save_state` and `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.parts, dataloader_config=settings)
    loader = DataLoader(case.data, case.batch_size, shuffle=case.is_shuffled)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    done = begun = 0
    if case.resumes:
        accelerator.load_state(SAVED)
        begun = int(Path(SAVED, "done").read_text())
    for epoch in range(begun // len(loader), NUM_EPOCHS):
        loader.set_epoch(epoch)
        skipped = begun - epoch * len(loader)
        done = max(epoch * len(loader), begun)
        for x, y in accelerator.skip_first_batches(loader, skipped) if skipped > 0 else loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.loss(model, x, y))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == case.stops_after:
                accelerator.save_state(SAVED)
                if accelerator.is_main_process:
                    Path(SAVED, "done").write_text(str(done))
                accelerator.wait_for_everyone()
                return accelerator.unwrap_model(model)
    return accelerator.unwrap_model(model)


def train_fabric(case: Case) -> nn.Module:
    """Lightning Fabric, with `no_backward_sync` and a loss that is divided by the parts."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(*build())
    loader = fabric.setup_dataloaders(DataLoader(case.data, case.batch_size, shuffle=case.is_shuffled))
    done = begun = 0
    if case.resumes:
        begun = fabric.load(SAVED, {"model": model, "optimizer": optimizer})["done"]
    for epoch in range(NUM_EPOCHS):
        if case.is_shuffled:
            loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            done += 1
            if done <= begun:
                continue
            is_last = number % case.parts == 0 or number == len(loader)
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(case.loss(model, x, y) / case.parts)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            if done == case.stops_after:
                fabric.save(SAVED, {"model": model, "optimizer": optimizer, "done": done})
                return model.module
    return model.module


def train_deepspeed(case: Case) -> nn.Module:
    """DeepSpeed, which makes the loader and counts the parts of a step."""
    import deepspeed

    module, optimizer = build()
    config = {
        "train_micro_batch_size_per_gpu": case.batch_size,
        "gradient_accumulation_steps": case.parts,
        "gradient_clipping": 0.0,  # 1.0 unless it is said, which is another training
    }
    deepspeed.init_distributed("gloo")
    sampler: DistributedSampler[Any] = DistributedSampler(case.data, shuffle=case.is_shuffled)
    loader = DataLoader(case.data, case.batch_size, sampler=sampler)
    model, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    done = begun = 0
    if case.resumes:
        _, state = model.load_checkpoint(SAVED)
        begun = state["done"]
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            done += 1
            if done <= begun:
                continue
            model.backward(case.loss(model, x, y))
            model.step()
            if done == case.stops_after:
                model.save_checkpoint(SAVED, client_state={"done": done})
                return module
    return module


def train_evenstep(case: Case) -> nn.Module:
    """evenstep, with `microbatches`, weights and a `Checkpointer`."""
    import evenstep

    with evenstep.init(seed=0, quiet=True):
        module, optimizer = build()
        model = evenstep.DistributedDataParallel(module)
        global_batch_size = case.batch_size * case.parts * 2
        loader = evenstep.DataLoader(case.data, global_batch_size=global_batch_size, shuffle=case.is_shuffled)
        checkpoint = evenstep.Checkpointer(SAVED, model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        done = 0
        for _ in loader.epochs(NUM_EPOCHS):
            for batch in loader:
                for x, y in model.microbatches(batch, case.parts):
                    model.backward(case.loss(model, x, y), weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
                done += 1
                if done == case.stops_after:
                    checkpoint.save()
                    return module
        return module


LIBRARIES: dict[str, tuple[str, Callable[[Case], nn.Module]]] = {
    "torch's DDP": ("torch", train_torch),
    "accelerate": ("accelerate", train_accelerate),
    "Fabric": ("lightning_fabric", train_fabric),
    "DeepSpeed": ("deepspeed", train_deepspeed),
    "evenstep": ("evenstep", train_evenstep),
}


def weights(model: nn.Module) -> Tensor:
    """All parameters of a model in a row."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def run(library: str, case: Case, directory: Path) -> Tensor:
    """Train on two ranks in a directory, and return rank 0's weights.

    Raises:
        RuntimeError: The program fails; the end of what it printed is in it.
    """
    directory.mkdir(exist_ok=True)
    torch.save((library, asdict(case)), directory / "program")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        "--rank",
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{library} ended with status {done.returncode}\n{done.stderr[-3000:]}")
    return torch.load(directory / "weights")


def distance(library: str, name: str) -> float:
    """How far the weights end from where they should, as a share of the way there from the start."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        if name == "resume":
            wanted = run(library, case, Path(folder, "whole"))
            run(library, replace(case, stops_after=5), Path(folder, "stopped"))
            got = run(library, replace(case, resumes=True), Path(folder, "stopped"))
        else:
            wanted, got = weights(train_alone(case)), run(library, case, Path(folder))
    return float((got - wanted).norm() / (wanted - weights(build()[0])).norm())


def main() -> None:
    """Print a table of the libraries that are installed, or be one rank of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the distances there, too, by case and library")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        library, case = torch.load("program")
        trained = LIBRARIES[library][1](Case(**case))
        if int(os.environ["RANK"]) == 0:
            torch.save(weights(trained), "weights")
        return
    names = [name for name, (module, _) in LIBRARIES.items() if importlib.util.find_spec(module) is not None]
    print("| |", " | ".join(names), "|")
    print("| --- |", " | ".join("---:" for _ in names), "|")
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        found[case] = {name: distance(name, case) for name in names}
        print(f"| {case} |", " | ".join(f"{each:.0e}" for each in found[case].values()), "|", flush=True)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
