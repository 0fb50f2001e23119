"""`evenstep doctor`, the part that runs the script: on some ranks, under watch."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.doctor.evidence.verdict import watched
from evenstep.doctor.findings import Watched
from evenstep.doctor.run.runs import watch

Say = Callable[[str], None]
_LIBRARIES = {"evenstep", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "deepspeed", "horovod"}
_OF_TORCH = ("torch.distributed", "torch.nn.parallel.Distributed", "torch.nn.parallel.distributed")


def run_under_watch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    num_steps: int = 12,
    device: str | None = None,
    limit_s: float = 300.0,
    say: Say = lambda line: None,
) -> Watched:
    """Run a script for some steps and say what was seen.

    Never raises for what the script does: that is told in `Watched.notes`.

    Args:
        script: Of the user's; runs unchanged. What it saves is kept apart, and trackers are told to stay silent.
        arguments: Its own.
        ranks: How many; a script that starts ranks of its own gets as many as it wants, up to 8.
        num_steps: Optimizer steps that are looked at, half of them in each of two epochs.
        device: As `evenstep run --device`.
        limit_s: A run that takes longer is ended.
        say: Told what is going on, a line each.
    """
    if not is_distributed(Path(script)):
        return Watched(
            notes=[
                f"It has no call that makes it distributed, so it was only read: `evenstep convert {script}` makes a "
                f"data-parallel script of it."
            ]
        )
    evidence = watch(script, arguments, ranks=ranks, num_steps=num_steps, device=device, limit_s=limit_s, say=say)
    files = {file for events in evidence.ranks for each in events for file, _ in each.places}
    sources = {file: Path(file).read_text(errors="replace").splitlines() for file in files if Path(file).is_file()}
    wants_gpus = "cuda" in Path(script).read_text(errors="replace").lower()
    return watched(evidence, script=script, directory=os.getcwd(), wants_gpus=wants_gpus, sources=sources)


def is_distributed(script: Path) -> bool:
    """Whether a script, or a module beside it that it imports, names something that communicates between ranks."""
    names = _names(script)
    modules = {name.split(".")[0] for name in names}
    beside = [path for each in modules for path in (script.parent / f"{each}.py", script.parent / each / "__init__.py")]
    return any(_communicates(each) for path in (script, *(p for p in beside if p.is_file())) for each in _names(path))


def _communicates(name: str) -> bool:
    return name.split(".")[0] in _LIBRARIES or any(name.startswith(each) for each in _OF_TORCH)


def _names(path: Path) -> set[str]:
    """Dotted names that a file imports or reads; none if it isn't python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.add(ast.unparse(node))
    return found
