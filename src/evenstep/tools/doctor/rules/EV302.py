"""cuda:0 on all ranks (error).

A fixed GPU is named, which every rank then uses.

All ranks of a host share one GPU, or tensors of a rank lie on two devices.

Wrong:

```python
weights = torch.load("model.pt", map_location="cuda:0")
```

Right:

```python
weights = torch.load("model.pt", map_location="cpu")
```

Ignore it if every rank sees one GPU only, which is then number 0.
"""

import re

from evenstep.tools.doctor.asking import Call, Found, Script, found, local_rank, on_all_ranks, text_of, walk

_NUMBER = re.compile(r"(?:[\"']cuda:)?(\d+)[\"']?")
_NUMBERED = re.compile(r"[\"']cuda:\d+[\"']")


def read(script: Script) -> Found:
    """Calls with a fixed GPU number. With several numbers in a script, each rank uses several GPUs: no finding."""
    texts = [*script.texts, *(text_of(call.positional(0)) for call in script.named(".cuda", ".to"))]
    if len({number[1] for each in texts if (number := _NUMBER.fullmatch(each))}) > 1:
        return
    told: set[int] = set()
    for call in script.calls:
        inside = {id(each) for each in walk(call.node)}
        if _is_fixed(call) and on_all_ranks(script, call) and not inside & told:
            told |= inside
            mend = "" if call.argument("map_location") else f'torch.device("cuda", {local_rank(script, call)})'
            yield found(call, f"{call.text} is the same GPU on every rank", mend=mend)


def _is_fixed(call: Call) -> bool:
    first, second = text_of(call.positional(0)), text_of(call.positional(1))
    if any(_NUMBERED.fullmatch(text_of(call.argument(each))) for each in ("device", "map_location")):
        return True
    if "DistributedDataParallel" in call.name:
        return bool(re.fullmatch(r"\[\d+\]", text_of(call.argument("device_ids", 1))))
    if call.name == "torch.device" and first in ("'cuda'", '"cuda"'):
        return second.isdecimal()
    if call.last in ("device", "to", "set_device", "set_default_device") and _NUMBERED.match(first):
        return True
    is_number = first.isdecimal() and (call.receiver is not None or call.last == "to")
    return is_number and call.last in ("cuda", "set_device", "to")
