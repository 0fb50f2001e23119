"""forward pass around the wrapper (error).

The loss that is trained on comes from `model.module` or one of its methods, and the wrapper is never called.

Gradients aren't averaged: every rank trains a model of its own, and nothing says so.

The wrapper's call begins the average over ranks. A run confirms it where ranks have other parameters after two steps.
While it trains, evenstep names the first such step.

Wrong:

```python
for x, y in loader:
    loss = model.module.compute_loss(x, y)
    loss.backward()
    optimizer.step()
```

Right:

```python
for x, y in loader:
    loss = model(x, y)  # its forward calls compute_loss
    loss.backward()
    optimizer.step()
```

Ignore it if the script averages gradients itself.
"""

import libcst as cst

from evenstep.tools.doctor.asking import Call, Found, Loop, Script, found, origins, shortened, text_of, walk
from evenstep.tools.doctor.scene import Scene, Seen, replicas_differ


def read(script: Script) -> Found:
    """Passes that make the loss of a step loop, in which no call is one of a wrapper."""
    made = [each for call in script.calls for each in script.values(call.node, call.frame) if each.kind == "wrapped"]
    models = {inner for each in made for inner in each.inner if inner.kind in ("model", "instance")}
    for loop in script.step_loops if made else ():
        inside = [call for call in script.calls if loop in script.loops_around(call.frame)]
        if any("wrapped" in script.kinds(call.node.func, call.frame) for call in inside):
            continue
        makes_loss = _makes_loss(script, loop)
        for call in inside:
            callee = call.node.func
            past = [each for each in walk(callee) if isinstance(each, cst.Attribute) and each.attr.value == "module"]
            called = script.values(callee, call.frame) | script.values(call.receiver, call.frame)
            is_inner = bool(called & models) and not any(each.kind == "wrapped" for each in called)
            is_past = any("wrapped" in script.kinds(each.value, call.frame) for each in past)
            if id(call.node) in makes_loss and (is_past or is_inner):
                over = (
                    f"the loop over {shortened(text_of(loop.iterates), 40)}" if loop.iterates else "the training loop"
                )
                yield found(call, f"{call.text} goes around the wrapper, and {over} never calls that")
                break


def seen(run: Scene) -> Seen:
    """Replicas that differ, though there is a wrapper: passes with gradients didn't go through it."""
    around = [each for each in run.evidence.all("forward") if each["grad"] and not each["wrapped"]]
    evidence = replicas_differ(run) if run.wrapper == "torch" and around else ""
    if evidence:
        yield run.finding(around[0].place, evidence)


def _makes_loss(script: Script, loop: Loop) -> set[int]:
    """The nodes of what the backward passes of a loop go back through."""
    passes: list[Call] = [each for each in script.backward_calls if loop in script.loops_around(each.frame)]
    losses = [(node, each.frame) for each in passes for node in (each.receiver, *each.arguments)]
    return {id(inner) for loss in losses for each, _ in origins(script, *loss) for inner in walk(each)}
