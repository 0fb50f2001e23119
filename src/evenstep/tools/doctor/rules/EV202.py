"""all ranks draw a progress bar (warning).

Every rank draws a progress bar.

Bars of several processes overwrite each other on one terminal.

Wrong:

```python
for x, y in tqdm(loader):
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
for x, y in tqdm(loader, disable=rank != 0):
    loss_fn(model(x), y).backward()
    optimizer.step()
```

With evenstep: `world.progress(loader)`. Ignore it if the output of other ranks is thrown away.
"""

from evenstep.tools.doctor.asking import (
    BARS,
    Call,
    Found,
    Script,
    distributed,
    found,
    has_argument_of_rank,
    in_training_or_evaluation,
    on_all_ranks,
    on_main,
    text_of,
)


def read(script: Script) -> Found:
    """Progress bars without `disable` in training and evaluation loops, and around their loaders."""
    for call in script.calls:
        if not BARS.fullmatch(call.name) or call.has_star or call.argument("disable") is not None:
            continue
        if not has_argument_of_rank(script, call) and on_all_ranks(script, call) and _is_in_training(script, call):
            condition = on_main(script, call) or f"{distributed(call.frame.file)}.get_rank() == 0"
            is_equal = condition.endswith(" == 0")
            disabled = condition.replace(" == 0", " != 0") if is_equal else f"not {condition}"
            mend = f"{text_of(call.node)[:-1].rstrip().rstrip(',')}, disable={disabled})"
            yield found(call, f"{call.text} runs on every rank", mend=mend)


def _is_in_training(script: Script, call: Call) -> bool:
    loops = [*script.training_loops, *script.evaluation_loops]  # such a loop may iterate over the bar
    return in_training_or_evaluation(script, call) or any(each.frame.function is call.frame.function for each in loops)
