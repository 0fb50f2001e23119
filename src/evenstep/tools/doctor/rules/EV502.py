"""wrong divisor (error).

The loss is divided by another number than that of the backward passes of a step, or by the world size.

The gradient is too large or too small by a factor, as if the learning rate were another.

DDP averages over ranks by itself, and accelerate divides by its `gradient_accumulation_steps`. Only a run shows the
mistake: `doctor` compares the factor of each loss with the number of backward passes in a step.

Wrong:

```python
for x, y in loader:
    loss = loss_fn(model(x), y) / world_size
    loss.backward()
    optimizer.step()
```

Right:

```python
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
```

Ignore it if the factor is meant, and the learning rate fits it.
"""

from collections.abc import Sequence

from evenstep.tools.doctor.scene import Event, Scene, Seen, passes_of_steps

COMPARED = ("divisor",)
_CLOSE = 1e-3  # relative difference up to which two divisors count as equal


def seen(run: Scene) -> Seen:
    """Mean losses divided by another number than that of the passes of a step."""
    for place, events, passes, _, in_all in passes_of_steps(run):
        evidence = wrong_factor(events, passes, run.world_size, in_all=in_all)
        num = passes if passes > 1 else in_all
        mend = f"(loss / {num}).backward()  # divided by nothing else" if num > 1 else "loss.backward()"
        if evidence:
            yield run.finding(place, evidence, mend=mend)


def wrong_factor(events: Sequence[Event], passes: int, world_size: int, *, in_all: int) -> str:
    """A text on what is wrong with the factor of a mean loss; "" if nothing is.

    Args:
        events: The backward passes of one line.
        passes: The number of this line's passes in a step.
        world_size: The number of ranks.
        in_all: The number of all lines' passes in a step. Several lines with one pass each may be an accumulation that
            is written out, whose losses are divided by this number; or different losses, each with its own weight.
    """
    factors = {round(float(each["factor"]), 9) for each in events if each["factor"] and each["is_mean"]}
    if len(factors) != 1 or any(not each["is_mean"] or each["weighted"] for each in events):
        return ""
    divisor = 1.0 / factors.pop()

    def is_by(number: float) -> bool:
        return abs(divisor / number - 1) < _CLOSE

    if is_by(passes) or is_by(in_all):
        return ""
    if passes > 1 and is_by(1):
        return f"{passes} backward passes in a step, and the loss was divided by nothing"
    num = passes if passes > 1 else in_all
    if world_size > 1 and is_by(num * world_size):
        also = f"{num} passes and " if num > 1 else ""
        return f"the loss was divided by {divisor:g}: by {also}the {world_size} ranks, over which DDP averages already"
    if passes > 1 and abs(divisor - round(divisor)) < _CLOSE and divisor > 1:
        return f"{passes} backward passes in a step, and the loss was divided by {divisor:g}"
    return ""
