"""pin_memory without non_blocking, or the reverse (note).

Of pinned memory and non-blocking copies the script has one, which has no effect without the other.

Each copy of a batch to the GPU waits, instead of running beside the computation.

Wrong:

```python
loader = DataLoader(train_set, batch_size=64, sampler=sampler, pin_memory=True)
for x, y in loader:
    x = x.cuda(local_rank)
    model(x).mean().backward()
    optimizer.step()
```

Right:

```python
loader = DataLoader(train_set, batch_size=64, sampler=sampler, pin_memory=True)
for x, y in loader:
    x = x.cuda(local_rank, non_blocking=True)
    model(x).mean().backward()
    optimizer.step()
```

Ignore it if batches are so small that copying them doesn't show.
"""

import libcst as cst

from evenstep.tools.doctor.asking import Call, Found, Script, found, is_true, per_step, text_of, training_loaders

_MODELS = {"model", "wrapped", "data parallel"}


def read(script: Script) -> Found:
    """The first copy of a step, or the first loader, that lacks the other's half."""
    loaders = [each for each in training_loaders(script) if each.name.startswith("torch.") and not each.has_star]
    copies = [call for call in script.calls if _copies(script, call) and per_step(script, call)]
    if not loaders or not copies or script.uses_accelerate or script.uses_fabric:
        return
    if any(is_true(each.argument("pin_memory", 7)) for each in loaders) and not script.uses("non_blocking"):
        first = min(copies, key=lambda each: (each.line, each.column))
        mend = f"{first.text[:-1]}, non_blocking=True)".replace("(, ", "(")
        yield found(first, f"{first.text} blocks, though the loader has pin_memory=True", mend=mend)
    elif any(is_true(each.argument("non_blocking")) for each in copies) and not script.uses("pin_memory"):
        loader = min(loaders, key=lambda each: each.line)
        evidence = f"{loader.text} has no pin_memory, so that non_blocking=True has no effect"
        yield found(loader, evidence, mend=f"{loader.text[:-1]}, pin_memory=True)")


def _copies(script: Script, call: Call) -> bool:
    """True of a copy of a batch to the device."""
    where = text_of(call.positional(0) or call.argument("device"))
    goes_up = call.last == "cuda" or (call.last == "to" and where and not where.startswith("torch."))
    is_named = isinstance(call.receiver, cst.Name | cst.Subscript | cst.Attribute)
    return bool(goes_up and is_named and not script.receiver_kinds(call) & _MODELS)
