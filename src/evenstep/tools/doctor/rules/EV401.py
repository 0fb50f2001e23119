"""collective on some ranks only (error).

A collective is called where only some ranks come by.

These ranks wait for the others, which never call it: the run hangs until a time-out.

Wrong:

```python
if rank == 0:
    dist.all_reduce(total)
    print(total.item())
```

Right:

```python
dist.all_reduce(total)  # every rank
if rank == 0:
    print(total.item())
```

A barrier in both branches, by which rank 0 goes first, is no finding. Ignore the rule if the others call it elsewhere.
"""

from evenstep.tools.doctor.asking import Found, Script, collectives, found, is_called_elsewhere, text_of, where
from evenstep.tools.doctor.calls import calls_on_some, is_guarded
from evenstep.tools.doctor.scene import Scene, Seen


def read(script: Script) -> Found:
    """Collectives under a condition that holds on some ranks, unless the other ranks call one of the same name."""
    guarded = [call for call in collectives(script) if script.perhaps_some_ranks_only(call.frame)]
    for call in guarded:
        alike = [each for each in guarded if each.last == call.last]
        if script.some_ranks_only(call.frame) and not is_called_elsewhere(script, call, alike):
            mend = f"{text_of(call.node)}  # outside of the condition: every rank calls it"
            yield found(call, f"{call.text} is called {where(script, call)}", mend=mend)


def seen(run: Scene) -> Seen:
    """Collectives that only some ranks called, under a condition on the rank."""
    for call, evidence, cost in calls_on_some(run):
        if is_guarded(run, call):
            yield run.finding(call.place, evidence, cost=cost)
