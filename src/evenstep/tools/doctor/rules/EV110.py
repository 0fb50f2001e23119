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

from evenstep.tools.doctor.asking import Found, Script, found, on_all_ranks, text_of
from evenstep.tools.doctor.scene import Scene, Seen, made_at, pairs

_MEND = """\
torch.manual_seed(0)  # before the data are made
torch.manual_seed(torch.distributed.get_rank())  # after it, so that ranks draw noise of their own"""


def read(script: Script) -> Found:
    """`random_split` in a script without a seed."""
    if any("seed" in call.last.lower() for call in script.calls if script.is_reached(call.frame)):
        return
    for call in script.named("torch.utils.data.random_split"):
        if call.argument("generator", 2) is None and on_all_ranks(script, call):
            mend = f"{text_of(call.node)[:-1].rstrip(', ')}, generator=torch.Generator().manual_seed(0))"
            yield found(call, f"{call.text} has no generator, and no seed is set", mend=mend)


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
