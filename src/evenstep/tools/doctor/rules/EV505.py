"""mean over different numbers of tokens (warning).

Each rank averages its loss over its own number of tokens, and DDP averages the ranks equally.

Tokens of a rank that has few of them count more: the gradient is not that of the global mean.

A run confirms it where ranks have different numbers, and withdraws it where no target was left out. An `ignore_index`
that the script never puts among its targets is not reported.

Wrong:

```python
for x, y in loader:
    y = y.masked_fill(y == pad_id, -100)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    loss.backward()
    optimizer.step()
```

Right:

```python
for x, y in loader:
    y = y.masked_fill(y == pad_id, -100)
    num_tokens = (y != -100).sum()
    dist.all_reduce(num_tokens)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    (loss * world_size / num_tokens).backward()
    optimizer.step()
```

With evenstep: `model.backward(loss, weight=num_tokens)`. Ignore it if all ranks always have the same number.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import Call, Found, Frame, Script, behind, dotted, found, has_wrapped, text_of
from evenstep.tools.doctor.scene import Event, Refuted, Scene, Seen

_MANY_LOSSES = 8  # of a rank, among which one with padding would be
_COUNTS = r"(?i)tok|count|num|mask|valid|denom|total|weight"
_OF_TOKENS = r"(?i)(?:mask|!=|ne\(|tokens|valid|pad)[^/]*\.sum\(\)"


def read(script: Script) -> Found:
    """Means over what is left of labels, in a script that never adds counts of the training over ranks."""
    weighted = any(call.argument("weight") is not None for call in script.backward_calls)
    if weighted or script.uses("num_items_in_batch") or not has_wrapped(script) or _adds_counts(script):
        return
    for call in script.named("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss"):
        ignored, function = call.argument("ignore_index"), call.frame.function
        is_mean = text_of(call.argument("reduction")).strip("\"'") not in ("sum", "none")
        is_known = function is not None and bool(script.called_from.get(function))
        is_of_evaluation = call.last == "cross_entropy" and is_known and not _in_training(script, call.frame)
        if ignored is not None and is_mean and not is_of_evaluation and _is_filled_in(script, text_of(ignored)):
            yield found(call, f"{call.text} averages over the targets of one rank that aren't {text_of(ignored)}")
    for each in (each for file in script.files for each in file.assignments):
        value = each.value
        if not isinstance(value, cst.BinaryOperation) or not isinstance(value.operator, cst.Divide):
            continue
        is_loss = "loss" in dotted(each.target) and ".sum()" in text_of(value.left) and _in_training(script, each.frame)
        if is_loss and behind(script, value.right, each.frame, _OF_TOKENS, 1):
            evidence = f"{text_of(each.target)} is divided by {text_of(value.right)}, the tokens of one rank"
            yield found((each.frame.file, each.line), evidence)


def seen(run: Scene) -> Seen:
    """Means over labels, and sums that the script has divided itself, of other numbers on two ranks."""
    backward, losses = run.evidence.of("backward"), run.evidence.of("loss")
    means = [[each for each in events if each["reduction"] == "mean"] for events in losses]
    plain = all(each["is_mean"] for events in backward for each in events)
    whole = all(len(each) >= _MANY_LOSSES and all(one["valid"] == one["labels"] for one in each) for each in means)
    if len(means) < 2:
        return
    divided = [{(e.place, e.step): 1.0 / e["factor"] for e in es if e["is_sum"] and e["factor"]} for es in backward]
    seen = "in {} steps ranks divided their sums by other numbers: {:g} and {:g} in one"
    yield from _different(run, divided[0], divided[1], seen)
    if whole and plain:
        yield Refuted()
    elif plain and not any(each["weighted"] or each["factor"] is None for events in backward for each in events):
        mine, other = ({(each.place, each.step): each for each in events if each.places} for events in means[:2])
        keys = [key for key in mine if key in other and _leaves_out(mine[key], other[key])]
        ours, theirs = ({key: float(each[key]["valid"]) for key in keys} for each in (mine, other))
        seen = "in {} steps the loss was a mean over other numbers of labels: {:g} and {:g} in one"
        yield from _different(run, ours, theirs, seen)


def _different(
    run: Scene,
    mine: dict[tuple[tuple[str, int], int], float],
    other: dict[tuple[tuple[str, int], int], float],
    seen: str,
) -> Seen:
    """Lines whose numbers differ between ranks in half of the steps."""
    places = {place for place, _ in mine if place[0]}
    for place in sorted(places):
        pairs = [(mine[key], other[key]) for key in mine if key[0] == place and mine[key] != other.get(key, mine[key])]
        if len(pairs) >= max(2, run.evidence.num_steps // 2):
            most = max(pairs, key=lambda each: abs(each[0] - each[1]))
            yield run.finding(place, seen.format(len(pairs), *most))


def _leaves_out(mine: Event, other: Event) -> bool:
    """Whether labels were left out; else a batch is just smaller than another."""
    return any(each["valid"] < each["labels"] for each in (mine, other))


def _adds_counts(script: Script) -> bool:
    """True if a number of tokens, or the like, is added over ranks outside of evaluations."""
    evaluations = {loop.frame.function for loop in script.evaluation_loops} - {None}
    sums: list[Call] = [call for call in script.named(".all_reduce", ".reduce") if call.node.args]
    return any(
        re.search(_COUNTS, text_of(call.positional(0)))
        for call in sums
        if call.frame.function not in evaluations or set(script.loops_around(call.frame)) & set(script.step_loops)
    )


def _in_training(script: Script, frame: Frame) -> bool:
    return any(loop in script.training_loops for loop in script.loops_around(frame))


def _is_filled_in(script: Script, ignored: str) -> bool:
    """True if targets may have the ignored value: a name, or a number that the script itself puts among them."""
    if not re.fullmatch(r"-? *\d+", ignored):
        return True
    number = re.escape(ignored)
    fills = rf"(?:fill_?|full|full_like|where|pad)\([^#\n]*{number}\b|padding_value *= *{number}\b"
    lists = rf"\[ *{number} *\] *[*+]|[*+] *\[ *{number} *\]"  # and no index, as in `x[:, [-1]]`
    return bool(re.search(rf"{fills}|\] *= *{number}\b|{lists}|DataCollator", script.code))
