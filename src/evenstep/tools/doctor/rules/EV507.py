"""batch norm over few rows (warning).

Batch normalisation takes its statistics from the few rows of one rank, eight or fewer.

Statistics of few rows are noise; replicas normalise differently, and accuracy falls as ranks are added.

See [batch normalisation](../../how-to/batch-norm.md).

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

import re

from evenstep.tools.doctor.asking import Found, Script, found, number
from evenstep.tools.doctor.scene import Scene, Seen, by_place, usual

FEW_ROWS = 8
_NORMALISES = re.compile(r"torch\.nn\.(?:Lazy)?BatchNorm[123]d|torchvision\.models\.(?:wide_)?resne.*")


def read(script: Script) -> Found:
    """The first loader of so few rows, in a script with such layers and no word of synchronising them."""
    layers = [call for call in script.calls if _NORMALISES.fullmatch(call.name)]
    if not layers or re.search(r"SyncBatchNorm|sync_batchnorm|sync_bn", script.code):
        return
    for loader in script.makers(script.training_loaders):
        if loader.name != "torch.utils.data.DataLoader":
            continue
        rows = number(script, loader.argument("batch_size", 1), loader.frame)
        if rows is not None and 1 < rows <= FEW_ROWS:
            wraps = [call for call in script.calls if call.name and "wrapped" in script.kinds_made(call)]
            where = f"{layers[0].last} (line {layers[0].frame.file.source.place(layers[0].line)[0]})"
            yield found((wraps or layers)[0], f"{where} takes its statistics from {rows} rows a rank")
            return


def seen(run: Scene) -> Seen:
    """The first normalisation that had fewer; a script that synchronises on GPUs is let alone: torch refuses a CPU."""
    for place, events in by_place(run.evidence.all("norm")).items():
        rows = usual(each["rows"] for each in events)
        if rows < FEW_ROWS and not run.facts.syncs_norms:
            yield run.finding(place, f"a batch normalisation took its statistics from {rows} rows")
            return
