"""all ranks save the checkpoint (error).

Every rank saves the same checkpoint to the same file.

Writes of several processes mix: the file may be unreadable, and nobody notices before it is needed.

Wrong:

```python
torch.save(model.module.state_dict(), "model.pt")
```

Right:

```python
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()  # before any rank reads it
```

`fabric.save`, `accelerator.save` and `evenstep.Checkpointer` are called on every rank and look after it. So does a
condition on the rank within a node, but on one node only. Ignore it if every rank has a file system of its own.
"""

from evenstep.tools.doctor.asking import (
    Found,
    Frame,
    Script,
    by_library,
    found,
    guarded,
    has_argument_of_rank,
    is_of_a_rank,
    on_all_ranks,
    saves,
    shortened,
    text_of,
    walk,
)
from evenstep.tools.doctor.scene import Scene, Seen, same_paths


def read(script: Script) -> Found:
    """Saving calls that run on every rank, or on one rank of every node."""
    for call in saves(script):
        once_a_node = _runs_once_a_node(script, call.frame)
        path = call.argument("f", 1) if call.last in ("save", "save_file", "save_model") else call.positional(0)
        if has_argument_of_rank(script, call) or is_of_a_rank(script, path, call):
            continue
        if on_all_ranks(script, call) or once_a_node:
            arguments = shortened(", ".join(text_of(each) for each in call.arguments))
            plain, edits = guarded(script, call)
            mend = by_library(
                script,
                call,
                accelerate=f"accelerator.save({arguments})",
                fabric=f"fabric.save({text_of(path)}, {text_of(call.argument('obj', 0))})  # every rank calls it",
            )
            where = "one rank of every node" if once_a_node else "every rank"
            evidence = f"{call.text} runs on {where}, and writes the same file"
            # Ranks that read the file must wait for it.
            edits = () if mend or once_a_node or script.named("torch.load") else edits
            yield found(call, evidence, mend=mend or plain, edits=edits)


def seen(run: Scene) -> Seen:
    """Files that several ranks saved."""
    for path, places in same_paths(run, "save").items():
        yield run.finding(places[0], f"{len(places)} ranks saved {path.rpartition('/')[2]}")


def _runs_once_a_node(script: Script, frame: Frame, depth: int = 3) -> bool:
    """Whether a frame, or each call of its function, is under `local_rank == 0` and no test of the global rank."""
    if script.starts_ranks:
        return False  # such a script starts ranks on one node only
    tests = [each for each in frame.outwards() if each.kind == "if" and each.holds]
    kinds = [script.kinds(inner, each) for each in tests for inner in walk(each.test)]
    if any("main" in each and "local main" not in each for each in kinds):
        return False
    sites = script.called_from.get(frame.function, []) if frame.function is not None and depth else []
    return any("local main" in each for each in kinds) or (
        bool(sites) and all(_runs_once_a_node(script, site.frame, depth - 1) for site in sites)
    )
