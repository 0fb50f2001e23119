"""no distributed sampler (error).

A loader of training data has no sampler that knows of ranks, or batches are drawn with the same seed on all ranks, so
every rank trains on the whole data set.

All ranks train on the same samples: an epoch costs as many epochs as there are ranks.

A run confirms it where two ranks see batches of the same content. A sampler that is given the rank within the node,
`rank=local_rank`, makes the same mistake on several nodes.

Wrong:

```python
loader = DataLoader(train_set, batch_size=64, shuffle=True)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
sampler = DistributedSampler(train_set, shuffle=True)
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
```

With accelerate: `loader = accelerator.prepare(loader)`. With Fabric: `loader = fabric.setup_dataloaders(loader)`. Or
take `evenstep.DataLoader`, which divides by itself.

Ignore it if the data set divides itself in a way that can't be read, such as in a compiled extension.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    RANK_IN_ARGUMENTS,
    Call,
    Edit,
    Found,
    Script,
    by_library,
    depends_on_ranks,
    distributed,
    divides_by_hand,
    dotted,
    found,
    is_of_rank,
    on_ranks,
    sampler_of,
    samplers,
    streams,
    target_of,
    text_of,
    training_loaders,
)
from evenstep.tools.doctor.scene import Scene, Seen, same_samples

COMPARED = ("repeated",)
_DRAWS = ("randint", "randperm", "integers")
_SEEDS = (".manual_seed", ".manual_seed_all", ".seed_everything", ".set_seed", "numpy.random.seed", "random.seed")


def read(script: Script) -> Found:
    """Training loaders without a distributed sampler, or with one for local ranks; batches drawn with equal seeds."""
    by_hand = divides_by_hand(script)
    for loader in training_loaders(script):
        sampler, dataset = sampler_of(loader), loader.argument("dataset", 0)
        if not script.starts_ranks:
            yield from _of_the_node(script, loader)
        if sampler is not None and script.kinds(sampler, loader.frame) != {"local sampler"}:
            continue
        is_divided = loader in script.prepared or by_hand or depends_on_ranks(script, dataset, loader.frame)
        is_of_all = on_ranks(script, loader) and not script.perhaps_some_ranks_only(loader.frame)
        if is_divided or loader.has_star or streams(script, loader) or not is_of_all:
            continue
        has = f"the sampler {text_of(sampler)}, which doesn't know of ranks" if sampler is not None else "no sampler"
        name = target_of(loader) or "loader"
        mend = by_library(
            script,
            loader,
            accelerate=f"{name} = accelerator.prepare({name})",
            fabric=f"{name} = fabric.setup_dataloaders({name})",
        )
        own, edits = ("", ()) if mend or sampler is not None else _with_a_sampler(script, loader)
        yield found(loader, f"{loader.text} has {has}", mend=mend or own, edits=edits)
    if not by_hand:
        yield from _same_draws(script)


def seen(run: Scene) -> Seen:
    """Two ranks read the same samples."""
    return same_samples(run, of_streams=False)


def _of_the_node(script: Script, loader: Call) -> Found:
    for site in samplers(script, loader):
        rank, num_replicas = site.argument("rank", 2), site.argument("num_replicas", 1)
        if script.kinds(rank, site.frame) == {"local rank"} and "local" not in text_of(num_replicas).lower():
            evidence = f"rank={text_of(rank)} is the rank within a node: with several nodes their ranks read the same"
            yield found(site, evidence, mend=_asking(site))


def _asking(sampler: Call) -> str:
    """The code of a sampler without `rank` and `num_replicas`, which it then takes from the process group."""
    plain = [text_of(each).rstrip(", ") for each in sampler.node.args]
    kept = [each for each in plain[:1] + plain[1:] if not re.match(r"(?:rank|num_replicas)\s*=", each)]
    return f"{target_of(sampler) or 'sampler'} = {text_of(sampler.node.func)}({', '.join(kept)})"


def _same_draws(script: Script) -> Found:
    """Batches that the script draws itself, from generators with the same seed on every rank."""
    seeds = [call for call in script.named(*_SEEDS) if script.is_reached(call.frame)]
    given = [(each, call.frame) for call in seeds for each in call.arguments]
    if not seeds or script.training_loaders or script.looked.unknown:
        return
    if any(is_of_rank(script, each, frame) or RANK_IN_ARGUMENTS.search(text_of(each)) for each, frame in given):
        return
    for call in script.calls:
        draws = call.last in _DRAWS and call.name and call.argument("generator") is None
        if draws and set(script.step_loops) & set(script.loops_around(call.frame)):
            evidence = f"{call.text} draws the same on every rank, as {seeds[0].text} seeds all of them alike"
            seed, rank = text_of(seeds[0].node)[:-1], f"{distributed(seeds[0].frame.file)}.get_rank()"
            yield found(call, evidence, mend=f"{seed} + {rank})")
            return


def _with_a_sampler(script: Script, loader: Call) -> tuple[str, tuple[Edit, ...]]:
    """(mend, edits) that pass a sampler instead of `shuffle`; edits only if the process group certainly exists."""
    dataset, shuffle, text = loader.argument("dataset", 0), text_of(loader.argument("shuffle")), text_of(loader.node)
    plain = re.sub(r",\s*shuffle=(?:True|False)\b", "", text)
    prefix, _, kind = dotted(loader.node.func).rpartition(".")
    is_named = isinstance(dataset, cst.Name | cst.Attribute) and kind == "DataLoader"
    # Positional arguments may have `shuffle` among them.
    if not is_named or "\n" in text or (plain == text) != (shuffle == "") or loader.positional(2) is not None:
        return "", ()
    name = f"{prefix}.DistributedSampler" if prefix else "DistributedSampler"
    sampler = f"sampler={name}({text_of(dataset)}, shuffle={shuffle or 'False'})"
    mended = f"{plain[:-1].rstrip().rstrip(',')}, {sampler})"
    groups = script.named("torch.distributed.init_process_group")
    is_made = any(each.frame.function is loader.frame.function and each.line < loader.line for each in groups)
    lines = loader.frame.file.source.text.split("\n")
    imported = rf"from torch\.utils\.data import (?!.*\().*\b{kind}\b"
    at = next((number for number, each in enumerate(lines, 1) if re.match(imported, each)), 0)
    mend = f"{target_of(loader) or 'loader'} = {mended}"
    if not (is_made and (prefix or at)) or lines[loader.line - 1].count(text) != 1:
        return mend, ()
    edit = Edit(loader.line, loader.line, lines[loader.line - 1].replace(text, mended))
    is_known = bool(prefix) or name in loader.frame.file.imports
    return mend, (edit,) if is_known else (Edit(at + 1, at, f"from torch.utils.data import {name}"), edit)
