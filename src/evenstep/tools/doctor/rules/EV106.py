"""stream read whole by every rank (error).

An IterableDataset doesn't look at the rank, so every rank reads all of it.

All ranks train on the same samples. A sampler can't help: torch refuses one for a stream.

Wrong:

```python
class Lines(IterableDataset):
    def __iter__(self):
        yield from open("corpus.txt")


loader = DataLoader(Lines(), batch_size=64)
for batch in loader:
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
```

Right:

```python
class Lines(IterableDataset):
    def __iter__(self):
        yield from itertools.islice(open("corpus.txt"), dist.get_rank(), None, dist.get_world_size())


loader = DataLoader(Lines(), batch_size=64)
for batch in loader:
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
```

With loader workers, divide by `get_worker_info()`, too. Ignore it if the stream is random, and differs between ranks.
"""

from evenstep.tools.doctor.asking import (
    Found,
    Script,
    depends_on_ranks,
    distributed,
    divides_by_hand,
    found,
    streams,
    text_of,
    training_loaders,
)
from evenstep.tools.doctor.scene import Scene, Seen, same_samples


def read(script: Script) -> Found:
    """Streams whose construction names no rank."""
    for loader in training_loaders(script):
        names, dataset = streams(script, loader), loader.argument("dataset", 0)
        if loader in script.prepared and script.uses_accelerate:
            continue  # accelerate shards streams, or sends batches from rank 0
        if not names or depends_on_ranks(script, dataset, loader.frame) or divides_by_hand(script):
            continue
        if names[0] != text_of(dataset):
            yield found(loader, f"{names[0]} is an IterableDataset that never looks at the rank")
        else:
            dist = distributed(loader.frame.file)
            given = f"{names[0]}, rank={dist}.get_rank(), world_size={dist}.get_world_size()"
            mend = f"{names[0]} = datasets.distributed.split_dataset_by_node({given})"
            yield found(loader, f"{names[0]} is a stream that isn't divided among ranks", mend=mend)


def seen(run: Scene) -> Seen:
    """Two ranks read the same samples of a stream."""
    return same_samples(run, of_streams=True)
