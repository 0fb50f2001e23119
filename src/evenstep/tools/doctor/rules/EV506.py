"""learning rate of the smaller batch (note).

The global batch grows with the number of ranks, and the learning rate of SGD does not.

With SGD a larger batch usually wants a learning rate larger by as much, and a warm-up (torch's LinearLR).

`doctor` notes it where two ranks already have more than 256 samples in a step (Goyal et al., "Accurate, Large Minibatch
SGD", 2017). See [learning rates](../../how-to/learning-rates.md).

Wrong:

```python
loader = DataLoader(train_set, batch_size=256, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
loader = DataLoader(train_set, batch_size=256, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Ignore it if the learning rate was found with this number of ranks.
"""

import re

from evenstep.tools.doctor.asking import WORLD, Found, Script, behind, found, has_wrapped, number, text_of

# Up to this global batch Goyal et al. leave the learning rate as it is.
REFERENCE_BATCH = 256
_KNOWS = r"(?i)warm_?up|LinearLR|OneCycleLR|scale_learning_rate|scaled_lr"


def read(script: Script) -> Found:
    """The first SGD whose rate, like the batch of each rank, is the same on any number of ranks."""
    is_torchs = script.uses_torch_distributed and not script.uses_accelerate and not script.uses_fabric
    loaders = script.makers(script.training_loaders)
    sizes = [(each.argument("batch_size", 1), each.frame) for each in loaders]
    if not is_torchs or not has_wrapped(script) or not loaders or re.search(_KNOWS, script.code):
        return
    if any(each.name.startswith("evenstep.") or each.has_star for each in loaders):
        return
    if any(size is None or behind(script, size, frame, WORLD) for size, frame in sizes):
        return
    rows = number(script, *sizes[0])
    for call in script.named("torch.optim.SGD") if rows is not None and 2 * rows > REFERENCE_BATCH else ():
        rate = call.argument("lr", 1)
        if rate is not None and not behind(script, rate, call.frame, rf"{WORLD.pattern}|scale"):
            shown = f"lr={text_of(rate)} and batch_size={text_of(sizes[0][0])}"
            yield found(call, f"{shown} are the same on any number of ranks")
            return
