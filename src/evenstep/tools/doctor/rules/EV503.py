"""clipping before unscale_ (error).

Gradients are clipped while they are multiplied by the loss scale.

The norm is too large by the scale, some tens of thousands, so that every step is clipped to almost nothing.

Wrong:

```python
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_fn(model(x), y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
```

Right:

```python
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    scaler.scale(loss_fn(model(x), y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
```

Never ignore it, unless the limit is multiplied by the scale.
"""

from evenstep.tools.doctor.asking import (
    Call,
    Edit,
    Found,
    Script,
    by_library,
    dotted,
    exclude_each_other,
    found,
    is_scaling,
    statement_of,
    text_of,
)


def read(script: Script) -> Found:
    """Clipping after backward passes with a scaler, without `unscale_` before it."""
    scalers = [call for call in script.named(".GradScaler") if text_of(call.argument("enabled")) != "False"]
    unscales = script.named(".unscale_", ".unscale_gradients")
    makers = script.named("accelerate.Accelerator")
    in_half = any(text_of(each.argument("mixed_precision")).strip("\"'") == "fp16" for each in makers)
    for clip in script.named("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
        function = clip.frame.function
        before = [
            each
            for each in script.backward_calls
            if each.frame.function is function and each.line < clip.line
            if not exclude_each_other(each.frame, clip.frame)
        ]
        if function is None and not script.loops_around(clip.frame):
            continue
        last = max((each.line for each in before if is_scaling(each.receiver)), default=clip.line)
        steps = [each for each in script.step_calls if each.node.args and each.frame.function is function]
        if any(last < each.line < clip.line for each in steps):
            continue  # the scaler's step has unscaled the gradients
        same = [each.line for each in unscales if each.frame.function is function]
        if scalers and before and not any(is_scaling(each.receiver) for each in before):
            continue  # clips gradients of passes without the scaler
        if scalers and (not unscales or (same and min(same) > clip.line)):
            mend, edits = _unscaled(script, clip)
            yield found(
                clip, f"{clip.text} clips gradients that are multiplied by the loss scale", mend=mend, edits=edits
            )
        elif not scalers and not unscales and in_half:
            arguments = text_of(clip.node).removeprefix(text_of(clip.node.func))
            mend = by_library(script, clip, accelerate=f"accelerator.{clip.last}{arguments}")
            evidence = f"{clip.text} clips gradients that accelerate has multiplied by its loss scale"
            yield found(clip, evidence, mend=mend)


def _unscaled(script: Script, clip: Call) -> tuple[str, tuple[Edit, ...]]:
    """(mend, edits) that add `scaler.unscale_(optimizer)` before the clipping, with the names of the next step."""
    steps = [each for each in script.step_calls if each.node.args and each.frame.function is clip.frame.function]
    names = {(dotted(each.receiver), text_of(each.positional(0))) for each in steps if each.line > clip.line}
    lines = statement_of(clip)
    if len(names) != 1:
        return "", ()
    ((scaler, optimizer),) = names
    mend = f"{scaler}.unscale_({optimizer})  # before it"
    if not lines or script.uses("unscale_"):
        return mend, ()
    return mend, (Edit(clip.line, clip.line - 1, f"{lines[0][: clip.column - 1]}{scaler}.unscale_({optimizer})"),)
