"""barrier in the step (warning).

A barrier is called in every step.

All ranks wait for the slowest in each step, and communication can't overlap with computing.

Wrong:

```python
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
    dist.barrier()
```

Right:

```python
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()  # no barrier: the gradients' all-reduce keeps ranks together
```

Ignore it while times are measured.
"""

from evenstep.tools.doctor.asking import BARRIERS, Found, Script, collectives, found, per_step


def read(script: Script) -> Found:
    """Barriers in every iteration of a step loop."""
    for call in collectives(script):
        if call.last in BARRIERS and per_step(script, call):
            mend = f"# no {call.text} here: the gradients' all-reduce keeps ranks together"
            yield found(call, f"{call.text} in every step", mend=mend)
