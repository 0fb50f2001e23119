"""learning rate set by one rank's result (error).

`ReduceLROnPlateau` gets a result of the rank's own part of the data.

One rank lowers its learning rate and others don't: the replicas drift apart, and nothing says so.

Wrong:

```python
def validate(model):
    losses = [loss_fn(model(x), y).item() for x, y in val_loader]
    return sum(losses) / len(losses)


val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, shuffle=False))
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(10):
    train(model, epoch)
    val_loss = validate(model)
    scheduler.step(val_loss)
```

Right:

```python
def validate(model):
    losses = [loss_fn(model(x), y).item() for x, y in val_loader]
    return sum(losses) / len(losses)


val_loader = DataLoader(val_set, sampler=DistributedSampler(val_set, shuffle=False))
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(10):
    train(model, epoch)
    val_loss = validate(model)
    mean = torch.tensor(float(val_loss))
    dist.all_reduce(mean)
    scheduler.step(mean.item() / dist.get_world_size())
```

Never ignore it.
"""

from evenstep.tools.doctor.asking import Found, OwnResults, Script, distributed, found, shortened, summed, text_of


def read(script: Script) -> Found:
    """Steps of a `ReduceLROnPlateau` with the result of an evaluation that ranks don't exchange."""
    if not script.uses("ReduceLROnPlateau"):
        return
    own = OwnResults(script)
    for call in (each for each in script.calls if each.last == "step" and each.arguments):
        made = script.makers(script.values(call.receiver, call.frame), "scheduler")
        given = call.arguments[0]
        if any(each.last == "ReduceLROnPlateau" for each in made) and own.measured(given, call.frame):
            dist, step = distributed(call.frame.file), text_of(call.node.func)
            evidence = f"`{shortened(text_of(given), 60)}` is a result of this rank's part of the validation data"
            lines = summed(script, "mean", text_of(given), dist)
            yield found(call, evidence, mend=f"{lines}{step}(mean.item() / {dist}.get_world_size())")
