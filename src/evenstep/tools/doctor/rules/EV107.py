"""same random augmentation on all ranks (warning).

All ranks have the same random state, so their augmentations and dropout masks are the same.

The gradient averages over fewer random draws than there are samples.

Only a run shows it: `doctor` compares random states where batches are made.

Wrong:

```python
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Dropout()))
```

Right:

```python
torch.manual_seed(rank)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Dropout()))
```

DDP makes replicas equal when it wraps them, so they may be built from different seeds. Ignore it if nothing random
depends on the sample.
"""

from evenstep.tools.doctor.scene import Scene, Seen, same_draws


def seen(run: Scene) -> Seen:
    """Two ranks loaded samples with the same random state."""
    of_workers = {place for place, _ in same_draws(run, of_workers=True)}
    # Workers with equal seeds have them on all ranks, too. That is one mistake, reported by EV108.
    for place, evidence in same_draws(run, of_workers=False):
        if place not in of_workers:
            yield run.finding(place, evidence)
