"""global rank as device (warning).

The GPU of a rank is chosen by its global rank.

On the second node ranks begin at 8, say, and there is no GPU 8: the run fails, there and only there.

Wrong:

```python
torch.cuda.set_device(dist.get_rank())
```

Right:

```python
torch.cuda.set_device(local_rank)
```

Ignore it if the script never runs on more than one node.
"""

import libcst as cst

from evenstep.tools.doctor.asking import Found, Script, behind, found, local_rank, walk

_SAYS_SO = r"\bget_rank\(\)|[\"'](?:RANK|SLURM_PROCID|OMPI_COMM_WORLD_RANK)[\"']"


def read(script: Script) -> Found:
    """The first device whose number certainly is the global rank."""
    if script.starts_ranks or script.uses_accelerate or script.uses_fabric or script.uses_evenstep:
        return
    for call in script.calls:
        given = [call.argument("device_ids", 1)] if "DistributedDataParallel" in call.name else []
        if call.last in ("set_device", "cuda", "to", "device"):
            given = [call.positional(0), call.positional(1), call.argument("device")]
        names = [each for node in given for each in walk(node) if isinstance(each, cst.Name | cst.Attribute | cst.Call)]
        is_rank = any(script.kinds(each, call.frame) == {"rank"} for each in names)
        # The rank must come from the process group or a launcher's variable, not only from a name.
        if is_rank and any(behind(script, each, call.frame, _SAYS_SO) for each in names):
            mend = f"torch.cuda.set_device({local_rank(script, call)})"
            yield found(call, f"{call.text} takes the global rank as the number of a GPU", mend=mend)
            return
