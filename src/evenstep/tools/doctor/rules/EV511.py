"""backward pass around the loss scale (error).

`loss.backward()` is called where accelerate or Fabric multiplies the loss by its scale in float16.

The step divides by a scale that gradients never had: they are as good as zero.

Wrong:

```python
accelerator = accelerate.Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
accelerator = accelerate.Accelerator(mixed_precision="fp16")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
```

Ignore it if the optimizer wasn't given to `prepare`.
"""

from evenstep.tools.doctor.asking import Found, Script, by_library, found, text_of


def read(script: Script) -> Found:
    """Calls of `loss.backward()` in a script whose library scales the loss."""
    chosen = [call.argument("mixed_precision") for call in script.named("accelerate.Accelerator")]
    chosen += [call.argument("precision") for call in script.named(".Fabric")]
    if not any(text_of(each).strip("\"'") in ("fp16", "16", "16-mixed") for each in chosen):
        return
    for backward in script.backward_calls:
        if not script.receiver_kinds(backward) & {"accelerator", "fabric"} and not backward.node.args:
            loss = text_of(backward.receiver)
            mend = by_library(
                script, backward, accelerate=f"accelerator.backward({loss})", fabric=f"fabric.backward({loss})"
            )
            yield found(backward, f"{backward.text} has no loss scale, and the step divides by it", mend=mend)
