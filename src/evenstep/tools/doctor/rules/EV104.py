"""global and local batch size confused (error).

A batch size meant for all ranks together is used by each of them, or the reverse.

The real batch is larger or smaller than meant by the number of ranks, and the learning rate doesn't fit it.

`DataLoader` takes the batch size of one rank; `evenstep.DataLoader` takes that of all ranks together.

Wrong:

```python
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=args.global_batch_size, sampler=sampler)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=args.global_batch_size // world_size, sampler=sampler)
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Ignore it if the name is misleading and the number is right; better, rename it.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    WORLD,
    Call,
    Found,
    Script,
    distributed,
    found,
    on_ranks,
    origins,
    own_name,
    text_of,
    training_loaders,
)

_GLOBAL = re.compile(r"(?i)global|total_batch|effective|overall|full_batch")
_LOCAL = re.compile(r"(?i)per_?(?:gpu|device|rank|replica|process|worker)|local_batch|micro_?batch")
_DIVIDED = re.compile(rf"(?i)//\s*[\w.()]*(?:{WORLD.pattern[4:]})")


def read(script: Script) -> Found:
    """Batch sizes whose names or arithmetic mean another batch than the loader's argument does."""
    trained = training_loaders(script)
    for loader in script.named("torch.utils.data.DataLoader", "evenstep.DataLoader"):
        ours = loader.name.startswith("evenstep.")
        size = loader.argument("global_batch_size" if ours else "batch_size", 1)
        if size is None or script.uses("split_batches") or not on_ranks(script, loader):
            continue
        texts = [text_of(each) for each, _ in origins(script, size, loader.frame)]
        joined = " ".join(texts)
        if ours:
            local = any(_LOCAL.search(each) for each in texts) and not WORLD.search(joined)
            if local or _DIVIDED.search(joined):
                mend = f"global_batch_size={text_of(size)} * {own_name(script, 'world', loader) or 'world'}.world_size"
                yield found(loader, f"global_batch_size={text_of(size)} is the batch of one rank", mend=mend)
        elif loader not in trained:
            continue
        elif _GLOBAL.search(joined) and not WORLD.search(joined) and "/" not in joined:
            what = next(each for each in texts if _GLOBAL.search(each))
            mend = f"batch_size={text_of(size)} // {distributed(loader.frame.file)}.get_world_size()"
            yield found(loader, f"batch_size={text_of(size)} is {what}, and each rank loads that many", mend=mend)
        elif (product := _times_world(script, size, loader)) is not None:
            evidence = f"batch_size={text_of(product)} multiplies by the number of ranks, and each rank loads that many"
            sides = (product.left, product.right)
            own = next((each for each in sides if "world size" not in script.kinds(each, loader.frame)), product.left)
            yield found(loader, evidence, mend=f"batch_size={text_of(own)}")
        elif what := next((each for each in texts if _LOCAL.search(each) and _DIVIDED.search(each)), ""):
            evidence = f"batch_size={what} divides the batch of one rank by the number of ranks"
            yield found(loader, evidence, mend=f"batch_size={what.partition('//')[0].strip()}")


def _times_world(script: Script, size: cst.CSTNode, loader: Call) -> cst.BinaryOperation | None:
    """The product with the number of ranks that a batch size is computed from; None if there is none."""
    for each, where in origins(script, size, loader.frame):
        if not isinstance(each, cst.BinaryOperation) or not isinstance(each.operator, cst.Multiply):
            continue
        if any("world size" in script.kinds(side, where) for side in (each.left, each.right)):
            return each
    return None
