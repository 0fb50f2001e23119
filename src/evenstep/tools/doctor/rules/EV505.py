"""mean over different numbers of tokens (warning).

Each rank averages its loss over its own number of tokens, and DDP averages the ranks equally.

Tokens of a rank that has few of them count more: the gradient is not that of the global mean.

Only a run shows it: `doctor` compares how many labels two ranks average over in the same step.

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

from evenstep.tools.doctor.scene import Event, Scene, Seen

COMPARED = ("average",)


def seen(run: Scene) -> Seen:
    """Means over labels, and sums that the script divides itself, by different numbers on two ranks."""
    backward, losses = run.evidence.of("backward"), run.evidence.of("loss")
    if len(losses) < 2:
        return
    divided = [{(e.place, e.step): 1.0 / e["factor"] for e in es if e["is_sum"] and e["factor"]} for es in backward]
    seen = "in {} steps ranks divided their sums by other numbers: {:g} and {:g} in one"
    yield from _different(run, divided[0], divided[1], seen)
    passes = [each for events in backward for each in events]
    if all(each["is_mean"] and not each["weighted"] and each["factor"] is not None for each in passes):
        means = [[each for each in events if each["reduction"] == "mean" and each.places] for events in losses[:2]]
        mine, other = ({(each.place, each.step): each for each in events} for events in means)
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
    """Whether labels were left out. If not, one batch is just smaller than the other."""
    return any(each["valid"] < each["labels"] for each in (mine, other))
