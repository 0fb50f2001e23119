"""optimizer of replaced parameters (error).

The optimizer is built from parameters that the model replaces afterwards.

The optimizer steps tensors that the model no longer has: the new parameters never change.

Only a run shows it: `doctor` compares the optimizer's tensors with those of all modules.

Wrong:

```python
net = torchvision.models.vit_b_16()
optimizer = torch.optim.AdamW(net.parameters())
net.heads = nn.Linear(768, 10)
```

Right:

```python
net = torchvision.models.vit_b_16()
net.heads = nn.Linear(768, 10)
optimizer = torch.optim.AdamW(net.parameters())
```

Ignore it if the new layers are meant to stay as they are.
"""

from evenstep.tools.doctor.scene import Scene, Seen


def seen(run: Scene) -> Seen:
    """Optimizers with tensors that no module has, while parameters with gradients belong to no optimizer."""
    for event in run.evidence.all("stepped"):
        if event["stale"] and event["untrained"]:
            evidence = (
                f"{event['stale']} tensors of the optimizer belong to no module, and {event['untrained']} parameters "
                f"with a gradient belong to no optimizer"
            )
            yield run.finding(event.place, evidence)
            return
