"""the host waits for the device in every step (warning).

A value is read from the GPU in every step: .item(), .cpu(), float(loss), print(loss).

The host can't run ahead of the device, so the device idles while the next step is prepared.

On a GPU a run counts the waits; on a CPU this is only read.

Wrong:

```python
for x, y in loader:
    loss = loss_fn(model(x.cuda(local_rank)), y.cuda(local_rank))
    loss.backward()
    optimizer.step()
    total += loss.item()
```

Right:

```python
for x, y in loader:
    loss = loss_fn(model(x.cuda(local_rank)), y.cuda(local_rank))
    loss.backward()
    optimizer.step()
    total += loss.detach()
```

What happens every hundredth step is no finding. Ignore it if the value decides what the next step does.
"""

import re

from evenstep.tools.doctor.asking import Call, Found, Script, found, names_in, per_step, text_of
from evenstep.tools.doctor.scene import Scene, Seen, by_place

_OF_TRAINING = re.compile(
    r"(?i)loss|acc|correct|norm|output|pred|logit|grad|\.sum\(|\.mean\(|argmax|\.eq\(|score|metric|perplexity"
)


def read(script: Script) -> Found:
    """The first such call of each line."""
    told: set[tuple[object, int]] = set()
    for call in script.calls:
        place = call.frame.file, call.line
        if place not in told and _waits(script, call) and per_step(script, call):
            told.add(place)
            yield found(call, f"{call.text} in every step")


def seen(run: Scene) -> Seen:
    """Lines that made the host wait for its GPU in every other step at least, of those that were listened to."""
    waits = run.evidence.of("sync")[0] if run.evidence.ranks else []
    num_steps = len({each.step for each in waits})
    for place, events in by_place(waits).items():
        if len(events) >= max(2, num_steps / 2):
            evidence = f"the host waited for the device here {len(events)} times in {num_steps} steps"
            yield run.finding(place, evidence)


def _waits(script: Script, call: Call) -> bool:
    read = text_of(call.receiver)
    if call.last in ("item", "tolist") and read and not call.node.args:
        return bool(_OF_TRAINING.search(read)) and not re.match(r"(?:world|fabric|accelerator)\.", read)
    if call.last == "cpu" and read:
        return bool(_OF_TRAINING.search(read)) and not script.receiver_kinds(call)
    if call.name == "float" and len(call.node.args) == 1:
        return bool(re.fullmatch(r"(?:\w+\.)*\w*loss\w*", text_of(call.positional(0))))
    if call.name == "print":
        names = {name for each in call.arguments for name in names_in(each)}
        return any(re.fullmatch(r"\w*loss", name) for name in names) and ".item()" not in call.text
    return call.name == "torch.cuda.synchronize"
