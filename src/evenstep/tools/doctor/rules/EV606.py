"""replicas differ (error).

Ranks join a process group, and nothing exchanges gradients: there is no wrapper, or the loss comes from `model.module`
or one of its methods, so that the wrapper is never called. Or every backward pass is under `no_sync()`, or each
rank changes the weights of a wrapped model by itself.

Every rank trains a model of its own on its part of the data, and nothing says so.

Only a run shows it: `doctor` compares the parameters of all ranks after two steps. It leaves out sharded parameters,
those that didn't change, LocalSGD, and scripts that make groups of ranks or send from rank to rank.

Wrong:

```python
dist.init_process_group()
loader = DataLoader(train_set, batch_size=64, sampler=DistributedSampler(train_set))
model = nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
```

Right:

```python
dist.init_process_group()
loader = DataLoader(train_set, batch_size=64, sampler=DistributedSampler(train_set))
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
```

Ignore it if ranks are meant to train models of their own.
"""

from evenstep.tools.doctor.scene import Scene, Seen, replicas_differ

COMPARED = ("drift",)


def seen(run: Scene) -> Seen:
    """Parameters that differ after two steps, reported at a pass that bypasses the wrapper, or at the backward pass."""
    passes = [each for each in run.evidence.all("backward") if each.places]
    around = [each for each in run.evidence.all("forward") if each["grad"] and not each["wrapped"] and each.places]
    evidence = replicas_differ(run) if passes else ""
    if evidence and run.wrapper and around:
        mend = "loss = criterion(model(x), y)  # of the wrapper itself, and not of model.module"
        yield run.finding(around[0].place, f"{evidence}, and this calls the model without its wrapper", mend=mend)
    elif evidence and run.wrapper and not any(each["synced"] for each in passes):
        mend = "with model.no_sync() if (i + 1) % steps else contextlib.nullcontext():  # the last pass exchanges"
        yield run.finding(passes[0].place, f"{evidence}, and every backward pass is under no_sync()", mend=mend)
    elif evidence:
        yield run.finding(passes[0].place, evidence)
