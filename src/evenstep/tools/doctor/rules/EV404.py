"""wrapped model called on rank 0 only (error).

The wrapped model is called where only some ranks come by.

Its forward pass may broadcast buffers, such as those of batch normalisation, its backward pass averages gradients: the
run hangs.

Wrong:

```python
model = DDP(net)
if rank == 0:
    output = model(x)
```

Right:

```python
model = DDP(net)
if rank == 0:
    output = model.module(x)
```

Ignore it if the model has no buffers and no gradient is computed; `.module` costs nothing, though.
"""

import re
from collections.abc import Iterator

from evenstep.tools.doctor.asking import (
    Call,
    Found,
    Frame,
    Script,
    Value,
    by_library,
    found,
    heading,
    is_called_elsewhere,
    text_of,
    where,
    wrappers_at,
)
from evenstep.tools.doctor.calls import models_on_some
from evenstep.tools.doctor.scene import Scene, Seen

_NO_GRAD = re.compile(r"\b(?:no_grad|inference_mode)\b")


def read(script: Script) -> Found:
    """Forward passes behind a condition that holds on some ranks, unless the others have them elsewhere."""
    calls = list(_wrapped_calls(script))
    for call in calls:
        callee = text_of(call.receiver if call.last == "forward" and call.receiver is not None else call.node.func)
        if not is_called_elsewhere(script, call, [each for each in calls if each.name == call.name]):
            inner = by_library(script, call, accelerate=f"accelerator.unwrap_model({callee})")
            given = ", ".join(text_of(each) for each in call.arguments)
            mend = f"{inner or callee + '.module'}({given})  # the model itself, or evaluate on every rank"
            yield found(call, f"{call.text} runs the wrapped model {where(script, call)}", mend=mend)


def seen(run: Scene) -> Seen:
    """Passes of some ranks that have sent something."""
    for forward, evidence, cost in models_on_some(run):
        yield run.finding(forward.place, evidence, cost=cost)


def _wrapped_calls(script: Script) -> Iterator[Call]:
    """The forward passes of wrapped models that surely run on some ranks only."""
    for call in script.calls:
        callee = call.receiver if call.last == "forward" and call.receiver is not None else call.node.func
        if not call.node.args or not script.some_ranks_only(call.frame):
            continue
        wrapped = [each for each in wrappers_at(script, callee, call.frame, call.line) if each.kind == "wrapped"]
        if wrapped and (_has_buffers(script, wrapped) or not _is_without_gradients(script, call.frame)):
            yield call


def _has_buffers(script: Script, wrapped: list[Value]) -> bool:
    """True if a model has buffers, which torch's wrapper broadcasts in each forward pass, or comes from elsewhere."""
    models = [inner for each in wrapped for inner in each.inner]
    made = script.makers(each for each in models if each.definition is None)
    if not all(each.name.startswith("torch.nn.") for each in made):
        return True
    layers = [call for call in script.calls if re.match(r"(?:Lazy)?BatchNorm\d|register_buffer", call.last)]
    return not models or any(all(each.kind != "if" for each in call.frame.outwards()) for call in layers)


def _is_without_gradients(script: Script, frame: Frame, depth: int = 4) -> bool:
    """True under `torch.no_grad()` or `torch.inference_mode()`, here or around all calls of the function."""
    function = frame.function
    if any(each.kind == "with" and _NO_GRAD.search(heading(each)) for each in frame.outwards()):
        return True
    sites = script.called_from.get(function, []) if function is not None and depth else []
    return (function is not None and any(_NO_GRAD.search(each) for each in function.decorators)) or (
        bool(sites) and all(_is_without_gradients(script, site.frame, depth - 1) for site in sites)
    )
