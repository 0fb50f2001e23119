"""batch norm over few rows (warning).

Batch normalisation takes its statistics from the few rows of one rank, fewer than eight.

Statistics of few rows are noise; replicas normalise differently, and accuracy falls as ranks are added.

Only a run shows it. See [batch normalisation](../../how-to/batch-norm.md).

Wrong:

```python
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
model = DDP(net)
loader = DataLoader(train_set, batch_size=4, sampler=sampler)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Right:

```python
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))
loader = DataLoader(train_set, batch_size=4, sampler=sampler)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
```

Ignore it if these layers are frozen, in evaluation mode.
"""

from evenstep.tools.doctor.scene import Scene, Seen, by_place, usual

FEW_ROWS = 8


def seen(run: Scene) -> Seen:
    """The first batch norm over few rows. Scripts that convert to SyncBatchNorm, which needs GPUs, have no finding."""
    for place, events in by_place(run.evidence.all("norm")).items():
        rows = usual(each["rows"] for each in events)
        if rows < FEW_ROWS and not run.facts.syncs_norms:
            yield run.finding(place, f"a batch normalisation took its statistics from {rows} rows")
            return
