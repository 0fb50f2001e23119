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

import statistics

from evenstep.tools.doctor.asking import BARRIERS, Found, Script, collectives, found, per_step
from evenstep.tools.doctor.scene import Scene, Seen, by_place

_IN_MOST = 0.5  # of the steps: a call that belongs to the step


def read(script: Script) -> Found:
    """Barriers in every round of a step loop."""
    for call in collectives(script):
        if call.last in BARRIERS and per_step(script, call):
            mend = f"# no {call.text} here: the gradients' all-reduce keeps ranks together"
            yield found(call, f"{call.text} in every step", mend=mend)


def seen(run: Scene) -> Seen:
    """Barriers in most steps, with what they have cost."""
    num_steps, entered = run.evidence.num_steps, run.evidence.of("enter")[0] if run.evidence.ranks else []
    left = {each["call"]: each.time_s for each in (run.evidence.of("leave")[0] if run.evidence.ranks else [])}
    for place, events in by_place(each for each in entered if each["op"] == "barrier").items():
        if num_steps < 2 or len({each.step for each in events}) < max(2.0, _IN_MOST * num_steps):
            continue
        waits = [left[each["call"]] - each.time_s for each in events if each["call"] in left]
        cost = f"{statistics.mean(waits) * 1000:.1f} ms of each step on rank 0" if waits else ""
        yield run.finding(place, f"{len(events)} barriers in {num_steps} steps", cost=cost)
