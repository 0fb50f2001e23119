"""the host waits for the device in every step (warning).

A value is read from the GPU in every step: .item(), .cpu(), float(loss), print(loss).

The host can't run ahead of the device, so the device idles while the next step is prepared.

`evenstep bench` counts the waits on a GPU, with their lines.

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

_OF_TRAINING = re.compile(
    r"(?i)loss|acc|correct|norm|output|pred|logit|grad|\.sum\(|\.mean\(|argmax|\.eq\(|score|metric|perplexity"
)


def read(script: Script) -> Found:
    """Calls in every step that make the host wait for the GPU."""
    for call in script.calls:
        if _waits(script, call) and per_step(script, call):
            value = text_of(call.receiver).removesuffix(".detach()")
            mend = f"{value}.detach()  # a tensor, which is read when it is shown" if value else ""
            yield found(call, f"{call.text} in every step", mend="" if call.name == "torch.cuda.synchronize" else mend)


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
