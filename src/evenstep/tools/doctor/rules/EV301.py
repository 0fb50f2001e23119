"""no set_device (error).

The script moves tensors to `cuda` without saying which, and never calls torch.cuda.set_device.

All ranks of a host use GPU 0: it runs out of memory, or NCCL refuses two ranks on one device.

Wrong:

```python
device = torch.device("cuda")
model = DDP(nn.Linear(8, 8).to(device))
```

Right:

```python
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda")
model = DDP(nn.Linear(8, 8).to(device))
```

Ignore it if the job's starter gives every rank one visible GPU.
"""

import re

from evenstep.tools.doctor.asking import Found, Script, found, local_rank, on_ranks, text_of


def read(script: Script) -> Found:
    """The first move to `cuda`, in a script that makes its process group itself: a library may choose the device."""
    makes_group = script.named("torch.distributed.init_process_group")
    chooses = script.named(".set_device", "torch.cuda.device") or script.uses("device_id")
    if (
        not makes_group
        or chooses
        or any("CUDA_VISIBLE_DEVICES" in each for each in script.texts)
        or script.uses_accelerate
        or script.uses_fabric
    ):
        return
    for call in script.calls:
        where = text_of(call.positional(0) or call.argument("device"))
        names_cuda = re.fullmatch(r"[\"']cuda[\"'](?: if .* else .*)?", where)
        has_number = call.last == "device" and call.argument("index", 1) is not None
        is_bare = call.last == "cuda" and call.receiver is not None and not call.node.args and call.name != "torch.cuda"
        if (is_bare or (call.last in ("device", "to") and names_cuda and not has_number)) and on_ranks(script, call):
            mend = f"torch.cuda.set_device({local_rank(script, call)})  # before it"
            yield found(call, f"{call.text} is GPU 0 on every rank: there is no torch.cuda.set_device", mend=mend)
            return
