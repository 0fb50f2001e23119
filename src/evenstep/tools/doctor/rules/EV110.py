"""data different on each rank (error).

A random split, or the data set itself, is made without a seed, so each rank has one of its own.

Samples that one rank validates on are trained on by others: the validation looks better than it is. If the data
themselves differ, each rank trains on other samples than the sampler has chosen.

A split is read. Data that differ are shown by a run: three samples are compared where a DistributedSampler divides
them.

Wrong:

```python
train_part, val_part = torch.utils.data.random_split(data, [900, 100])
```

Right:

```python
generator = torch.Generator().manual_seed(0)
train_part, val_part = torch.utils.data.random_split(data, [900, 100], generator=generator)
```

Ignore it if the seed is set in a file that isn't the script's own, or each rank draws its data on purpose.
"""

from collections.abc import Sequence

from evenstep.tools.doctor.asking import Call, Found, Script, found, is_of_rank, on_all_ranks, text_of
from evenstep.tools.doctor.scene import Scene, Seen, made_at, pairs

_MEND = """\
torch.manual_seed(0)  # before the data are made
torch.manual_seed(torch.distributed.get_rank())  # after it, so that ranks draw noise of their own"""


def read(script: Script) -> Found:
    """`random_split` in a script without a seed that all ranks have."""
    if any(_seeds_alike(script, call) for call in script.calls if script.is_reached(call.frame)):
        return
    for call in script.named("torch.utils.data.random_split"):
        if call.argument("generator", 2) is None and on_all_ranks(script, call):
            mend = f"{text_of(call.node)[:-1].rstrip(', ')}, generator=torch.Generator().manual_seed(0))"
            yield found(call, f"{call.text} has no generator, and no seed is the same on all ranks", mend=mend)


def _seeds_alike(script: Script, call: Call) -> bool:
    """Whether a call seeds what a split draws from, with the same seed on all ranks."""
    is_generators = call.last == "manual_seed" and not call.name.startswith("torch.")
    is_seeding = "seed" in call.last.lower() and not is_generators
    return is_seeding and not any(is_of_rank(script, each, call.frame) for each in call.arguments)


def seen(run: Scene) -> Seen:
    """Samples with equal indices but different contents on two ranks, although a sampler divides them."""
    for rank, mine, other in pairs(run.loops):
        ours, theirs = mine.begin["looks"], other.begin["looks"]
        are_other = bool(ours and theirs) and _are_other(ours, theirs)
        if are_other and mine.begin["is_distributed"]:
            evidence = f"sample 0 and others have other contents on rank {rank} than on rank 0"
            yield run.finding(made_at(mine), evidence, mend=_MEND)


def _are_other(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether three samples differ in all their parts. If the first parts agree, the difference may be noise."""
    differs, parts = [a != b for a, b in zip(ours, theirs, strict=False)], max(1, len(ours) // 3)
    return len(ours) == len(theirs) and all(differs[::parts]) and all(any(differs[k::parts]) for k in range(parts))
