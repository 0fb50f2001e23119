"""accumulation without no_sync (warning).

Gradients are accumulated over several backward passes, and each of them averages over ranks.

The exchange runs as often as there are micro-batches, where once per step is enough.

Only a run shows it: `doctor` counts the exchanges of a step.

Wrong:

```python
for i, (x, y) in enumerate(loader):
    (loss_fn(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
```

Right:

```python
for i, (x, y) in enumerate(loader):
    with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
        (loss_fn(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
```

With accelerate: `accelerator.accumulate(model)`. With Fabric: `fabric.no_backward_sync`. With evenstep:
`model.accumulate` or `model.microbatches`. Ignore it if memory for accumulated gradients is short (FSDP keeps them
whole).
"""

from evenstep.tools.doctor.scene import MIB, Scene, Seen, passes_of_steps


def seen(run: Scene) -> Seen:
    """Lines with several backward passes per step, each of which exchanged gradients."""
    sizes = run.evidence.of("wrapped")[0] if run.evidence.ranks else []
    mib = sum(each["num_bytes"] for each in sizes) / MIB
    for place, _, passes, synced, _ in passes_of_steps(run):
        if passes > 1 and synced == passes:
            evidence = f"{passes} backward passes in a step, and gradients were exchanged in each of them"
            yield run.finding(
                place, evidence, cost=f"{passes - 1} of {passes} exchanges of {mib:.3g} MiB are superfluous"
            )
