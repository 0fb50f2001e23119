"""different numbers of collectives (error).

A condition on data, or a loop over a rank's own batches, leads ranks to different numbers of collectives, or to another
order.

A rank waits for a call that never comes, or ranks combine tensors that have nothing to do with each other.

Two kinds are read: a step that a rank leaves out because its own loss is NaN, and a stop that rests on a rank's own
part of the validation data. Only a run shows the others.

Wrong:

```python
for x, y in loader:
    loss = loss_fn(model(x), y)
    if torch.isnan(loss):
        continue
    loss.backward()
    optimizer.step()
```

Right:

```python
for x, y in loader:
    loss = loss_fn(model(x), y)
    is_bad = torch.isnan(loss).float()
    dist.all_reduce(is_bad)
    if is_bad > 0:
        continue  # on every rank
    loss.backward()
    optimizer.step()
```

Never ignore it.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    Found,
    Frame,
    OwnResults,
    Script,
    distributed,
    found,
    has_wrapped,
    last_of,
    leaves,
    shortened,
    summed,
    target_of,
    text_of,
    walk,
)
from evenstep.tools.doctor.calls import (
    ENDED,
    calls_of,
    calls_on_some,
    ended_apart,
    first_apart,
    how_it_hangs,
    is_guarded,
    models_on_some,
    told_call,
)
from evenstep.tools.doctor.scene import Scene, Seen, different_lengths

_Leaving = dict[Frame, list[tuple[Frame, str]]]


def read(script: Script) -> Found:
    """Steps that a rank skips, and loops that it ends, by a condition on its own numbers."""
    own, leaving = OwnResults(script), _ifs_that_leave(script)
    yield from _steps_left_out(script, own, leaving)
    yield from _stops_alone(script, own, leaving)


def seen(run: Scene) -> Seen:
    """Collectives that only some ranks called, by a condition on data; or other differences between ranks' calls."""
    on_some = calls_on_some(run)
    for call, evidence, cost in on_some:
        if not is_guarded(run, call):
            yield run.finding(call.place, evidence, cost=cost)
    if on_some or run.error is not None or models_on_some(run) or different_lengths(run):
        return
    hang, apart = run.evidence.hang, first_apart(run.evidence.ranks)
    if apart is not None:
        here, there, rank = apart
        evidence = f"where rank 0 called {told_call(run, here)}, rank {rank} called {told_call(run, there)}"
        yield run.finding(here.place, evidence, cost=ENDED if hang is None else "")
    elif hang is not None and hang.waiting and hang.missing:  # else all are in one call, and the machine is busy
        yield run.finding(hang.waiting[min(hang.waiting)].place, how_it_hangs(run))
    elif ended_apart(run):
        counts = [len(calls_of(events)) for events in run.evidence.ranks]
        yield run.finding(
            ("", 1), f"ranks have made different numbers of collective calls: {', '.join(map(str, counts))}", cost=ENDED
        )


def _ifs_that_leave(script: Script) -> _Leaving:
    """By loop frame, the `if` branches in its body that end with `continue`, `break` or `return`, and their texts."""
    leaving: _Leaving = {}
    for each in (each for file in script.files for each in file.ifs):
        body = each.node.body if isinstance(each.node, cst.If) and leaves(each.node.body) else None
        text = text_of(body)
        if body is not None and not re.search(r"\braise\b|exit\(", text):
            for around in each.outwards():
                leaving.setdefault(around, []).append((each, text))
    return leaving


def _steps_left_out(script: Script, own: OwnResults, leaving: _Leaving) -> Found:
    """Steps with `if torch.isnan(loss): continue` before the backward pass, in which the other ranks wait."""
    for loop in script.step_loops if has_wrapped(script) else ():
        passes = [each for each in script.backward_calls if loop in script.loops_around(each.frame)]
        for each, _ in leaving.get(loop.frame, ()):
            tested = {last_of(inner) for inner in walk(each.test) if isinstance(inner, cst.Call)}
            is_before = any(one.frame.function is each.function and one.line > each.line for one in passes)
            if tested & {"isnan", "isinf", "isfinite"} and is_before and not own.is_shared(each.test, each):
                test, dist = text_of(each.test), distributed(each.file)
                evidence = (
                    f"a rank where `{shortened(test, 60)}` holds skips the backward pass; other ranks wait in theirs"
                )
                lines = summed(script, "is_bad", test, dist)
                yield found(
                    (each.file, each.line), evidence, mend=f"{lines}if is_bad > 0:\n    continue  # on every rank"
                )


def _stops_alone(script: Script, own: OwnResults, leaving: _Leaving) -> Found:
    """Loops that end by a result of the rank's own part of the validation data."""
    for loop in script.training_loops:
        for each, body in leaving.get(loop.frame, ()) if loop not in script.step_loops else ():
            measured = own.measured(each.test, each)
            if "continue" not in body and measured:
                evidence = (
                    f"`{shortened(text_of(each.test), 60)}` depends on this rank's part of the validation data: one "
                    f"rank may stop while others go on"
                )
                result, dist = target_of(measured[0]) or "val_loss", distributed(each.file)
                lines = summed(script, "mean", result, dist)
                mend = f"{lines}{result} = mean.item() / {dist}.get_world_size()  # before {result} is compared"
                yield found((each.file, each.line), evidence, mend=mend)
                return
