"""optimizer stepped beside the scaler (error).

`optimizer.step()` is called although `scaler.step(optimizer)` has made the step.

Parameters move twice by the same gradients; and where the scaler left a step out, by gradients that are infinite or not
a number.

Wrong:

```python
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)
    optimizer.step()
    scaler.update()
```

Right:

```python
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.step(optimizer)  # steps the optimizer, unless gradients overflowed
    scaler.update()
```

Never ignore it.
"""

from evenstep.tools.doctor.asking import (
    Edit,
    Found,
    Script,
    exclude_each_other,
    found,
    statement_of,
    text_of,
)


def read(script: Script) -> Found:
    """Optimizers that step twice in one iteration: through the scaler and directly."""
    scaled = [call for call in script.step_calls if call.node.args and call.receiver is not None]
    for call in script.step_calls:
        name = text_of(call.receiver)
        if call.node.args or not name:
            continue
        beside = [
            each
            for each in scaled
            if each.frame.function is call.frame.function and text_of(each.positional(0)) == name
            if script.loops_around(each.frame)[:1] == script.loops_around(call.frame)[:1]
            if not exclude_each_other(each.frame, call.frame)
        ]
        if beside:
            edits = (Edit(call.line, call.line, ""),) if len(statement_of(call)) == 1 else ()
            evidence = f"{call.text} steps again what {beside[0].text} steps"
            yield found(call, evidence, mend=f"{beside[0].text}  # alone", edits=edits)
