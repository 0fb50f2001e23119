"""ranks with different numbers of batches (error).

Ranks have different numbers of batches in an epoch.

The rank with the most waits, in an all-reduce of gradients, for others that have left the loop: the run hangs.

Only a run shows it; `doctor` compares the lengths before anything hangs.

Wrong:

```python
mine = Subset(train_set, range(rank, len(train_set), world_size))
loader = DataLoader(mine, batch_size=64)
```

Right:

```python
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
```

`with Join([model]):` lets ranks end early, and `evenstep.DistributedDataParallel` takes empty batches. Ignore it if the
script does something of that kind by itself.
"""

from evenstep.tools.doctor.scene import Scene, Seen, different_lengths


def seen(run: Scene) -> Seen:
    """Loaders of different lengths, or a loop that ended on one rank while another made a step."""
    for place, evidence in different_lengths(run):
        yield run.finding(place, evidence)
