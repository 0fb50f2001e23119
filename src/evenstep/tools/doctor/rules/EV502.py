"""wrong divisor (error).

The loss is divided by another number than that of the backward passes of a step, or by the world size.

The gradient is too large or too small by a factor, as if the learning rate were another.

DDP averages over ranks by itself, and accelerate divides by its `gradient_accumulation_steps`.

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

import re
import sys
from collections.abc import Iterator, Sequence

import libcst as cst

from evenstep.tools.doctor.asking import (
    WORLD,
    Call,
    Found,
    Frame,
    Script,
    accumulating,
    assignments_to,
    by_library,
    found,
    has_wrapped,
    is_scaling,
    text_of,
)
from evenstep.tools.doctor.scene import Event, Scene, Seen, passes_of_steps

COMPARED = ("divisor", "average")
_CLOSE = 1e-3  # relative difference of two divisors that are taken as equal
_SIZES = r"len\(.*\)|(?:\w+\.)*(?:\w*batch_size|num_batches|n_batches|epochs)"


def read(script: Script) -> Found:
    """Losses by what they are divided by, also in functions that have computed them."""
    for backward, count in accumulating(script):
        if backward.argument("weight") is None and not script.uses_evenstep:
            yield from _not_by_passes(script, backward, count)
    counts = [each.argument("gradient_accumulation_steps") for each in script.named("accelerate.Accelerator")]
    twice = [text_of(each) for each in counts if each is not None]
    averages = has_wrapped(script) and not script.uses("register_comm_hook")
    for backward in script.backward_calls:
        is_accelerates = "accelerator" in script.receiver_kinds(backward)
        for divisor in _divisors_of(script, backward) if twice and is_accelerates else ():
            if divisor in twice or "gradient_accumulation_steps" in divisor:
                evidence = f"the loss is divided by {divisor}, and once more by accelerator.backward"
                yield found(
                    backward, evidence, mend=by_library(script, backward, accelerate="accelerator.backward(loss)")
                )
        for divisor in _divisors_of(script, backward, inside=True) if averages else ():
            if WORLD.search(divisor) and "tokens" not in divisor:
                evidence = f"the loss is divided by {divisor}, and DDP averages gradients over ranks itself"
                yield found(backward, evidence, mend="loss.backward()  # of a loss that isn't divided")
                break


def seen(run: Scene) -> Seen:
    """Mean losses that were divided by another number than a step has passes."""
    for place, events, passes, _, in_all in passes_of_steps(run):
        evidence = wrong_factor(events, passes, run.world_size, in_all=in_all)
        if evidence:
            yield run.finding(place, evidence)


def wrong_factor(events: Sequence[Event], passes: int, world_size: int, *, in_all: int) -> str:
    """What is wrong with the number that the mean loss is multiplied by, in words; "" if nothing is.

    Args:
        events: The backward passes of one line.
        passes: How many of them a step has.
        world_size: Ranks.
        in_all: How many a step has of all lines. Lines of one pass each may be an accumulation that is written out, and
            then they are divided by all of them; or losses of several kinds, with a weight each, or none.
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


def _not_by_passes(script: Script, backward: Call, count: str) -> Found:
    divisors = list(_divisors_of(script, backward))
    last = re.escape(count.rpartition(".")[2])
    sums = any(text_of(call.argument("reduction"))[1:-1] == "sum" for call in script.calls)
    by_itself = any("accelerator" in script.receiver_kinds(call) for call in script.named(".accumulate"))
    is_elsewhere = re.search(rf"/=?\s*\(?(?:\w+\.)*{last}\b|/ len\(micro", script.code)
    if not divisors and not sums and not by_itself and not is_elsewhere:
        evidence = f"gradients of {count} backward passes are added, and the loss isn't divided by {count}"
        yield found(backward, evidence, mend=f"loss = loss / {count}")
    for divisor in divisors:
        is_right = divisor == count or (count in divisor and not WORLD.search(divisor))
        is_number = divisor.isdecimal() and count.isdecimal()
        if not is_right and (is_number or re.fullmatch(_SIZES, divisor)):
            evidence = f"the loss is divided by {divisor}, and gradients of {count} backward passes are added"
            yield found(backward, evidence, mend=f"loss = loss / {count}")


def _divisors_of(script: Script, backward: Call, *, inside: bool = False) -> Iterator[str]:
    """What the loss of a backward call is divided by before it.

    Args:
        script: Which.
        backward: The call.
        inside: Also by the script's own functions that have computed it.
    """
    loss = backward.positional(0) if script.receiver_kinds(backward) & {"accelerator", "fabric", "wrapped"} else None
    loss = loss if loss is not None else backward.receiver
    loss = loss.args[0].value if isinstance(loss, cst.Call) and is_scaling(loss) else loss
    pending = [] if loss is None else [(loss, backward.frame, backward.line)]
    seen: set[int] = set()
    while pending:
        node, frame, line = pending.pop()
        while isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide | cst.Multiply):
            if isinstance(node.operator, cst.Divide):
                yield text_of(node.right)
            node = node.left
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, cst.Name):
            before = [each for each in assignments_to(script, node.value, frame) if each.line <= line]
            yield from (text_of(each.value) for each in before if each.operator == "/=")
            pending += [(each.value, each.frame, each.line) for each in before if each.operator == "="]
        elif inside and isinstance(node, cst.Call) and (call := script.record(node)) is not None:
            for target in script.functions_of(call):
                whole = Frame("function", None, target.file, target)
                pending += [(value, whole, sys.maxsize) for value in target.returns]
