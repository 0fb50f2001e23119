"""tensors travel by way of the host (warning).

A tensor goes from GPU to GPU through the host's memory: `.cpu()` and back, or as a pickled object.

Each copy waits for the device and crosses the bus twice, where NCCL would send it directly.

Wrong:

```python
features = model.module(x.cuda()).detach()
again = features.cpu().cuda()
```

Right:

```python
features = model.module(x.cuda(local_rank)).detach()
gathered = torch.empty(world_size * len(features), 8, device=features.device)
dist.all_gather_into_tensor(gathered, features)
```

Ignore it for small tensors outside of the step.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import Call, Found, Script, assignments_to, found, last_of, text_of

_TENSOR = r"\.detach\(\)|\.cpu\(\)$|torch\.(?:stack|cat|tensor|zeros|ones)\("
_PICKLES = {"all_gather_object": 1, "gather_object": 0, "broadcast_object_list": 0}


def read(script: Script) -> Found:
    """`.cpu()` and back, and tensors among pickled objects."""
    for call in script.calls:
        target = text_of(call.positional(0))
        goes_up = call.last == "cuda" or (call.last == "to" and re.search(r"(?i)cuda|device|rank|gpu", target))
        if goes_up and call.receiver is not None and _comes_from_the_host(script, call.receiver, call):
            yield found(call, f"{call.text} comes back from the host's memory")
        elif call.last in _PICKLES and "distributed" in call.name:
            sent = call.argument("obj", _PICKLES[call.last])
            if sent is not None and (re.search(_TENSOR, text_of(sent)) or _is_always(script, sent, call, _TENSOR)):
                yield found(call, f"{call.text} pickles a tensor, by way of the host")


def _comes_from_the_host(script: Script, receiver: cst.CSTNode, call: Call) -> bool:
    inner = receiver
    while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
        if last_of(inner) == "cpu":
            return True
        inner = inner.func.value
    return _is_always(script, receiver, call, r"\.cpu\(\)$")


def _is_always(script: Script, name: cst.CSTNode, call: Call, pattern: str) -> bool:
    """True of a name that is never given anything else."""
    values = assignments_to(script, name.value, call.frame) if isinstance(name, cst.Name) else []
    return bool(values) and all(re.search(pattern, text_of(each.value)) for each in values)
