"""workers draw the same random numbers (warning).

Loader workers begin with the same random state: a constant seed, or a generator that each of them copied.

Samples of different workers have the same augmentation, in every batch.

torch seeds `random`, torch and NumPy differently in each worker. That is lost if `worker_init_fn` seeds with a
constant, and it doesn't reach a generator that the data set holds.

Wrong:

```python
def seed_worker(worker_id):
    np.random.seed(0)


loader = DataLoader(train_set, batch_size=64, num_workers=4, worker_init_fn=seed_worker)
```

Right:

```python
def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


loader = DataLoader(train_set, batch_size=64, num_workers=4, worker_init_fn=seed_worker)
```

Only a run shows it: `doctor` compares the random states of workers. Ignore it if the numbers drawn don't depend on the
sample.
"""

from evenstep.tools.doctor.scene import Scene, Seen, same_draws


def seen(run: Scene) -> Seen:
    """Two workers loaded samples with the same random state."""
    for place, evidence in same_draws(run, of_workers=True):
        yield run.finding(place, evidence)
