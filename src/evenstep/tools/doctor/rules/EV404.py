"""wrapped model called on rank 0 only (error).

The wrapped model is called where only some ranks come by.

Its forward pass may broadcast buffers, such as those of batch normalisation, its backward pass averages gradients: the
run hangs.

Wrong:

```python
model = DDP(net)
if rank == 0:
    output = model(x)
```

Right:

```python
model = DDP(net)
if rank == 0:
    output = model.module(x)
```

Only a run shows it: `doctor` compares which ranks come by, and whether their pass sends anything.

Ignore it if the model has no buffers and no gradient is computed; `.module` costs nothing, though.
"""

from evenstep.tools.doctor.calls import models_on_some
from evenstep.tools.doctor.scene import Scene, Seen


def seen(run: Scene) -> Seen:
    """Forward passes that only some ranks made and that communicate."""
    for forward, evidence, cost in models_on_some(run):
        yield run.finding(forward.place, evidence, cost=cost)
