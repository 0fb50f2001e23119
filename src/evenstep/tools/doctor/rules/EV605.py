"""DataParallel (warning).

The model is wrapped by torch.nn.DataParallel.

One process drives all GPUs: it copies the model in every forward pass, gathers outputs on the first GPU, and its
threads share one interpreter lock.

`evenstep convert` rewrites such a script.

Wrong:

```python
model = nn.DataParallel(net)
```

Right:

```python
model = DDP(net, device_ids=[local_rank])
```

Ignore it for a few minutes' work on one machine. A script that can do both, DDP and this, is no finding.
"""

from evenstep.tools.doctor.asking import Found, Script, found


def read(script: Script) -> Found:
    """Uses of DataParallel, in a script without torch.distributed."""
    for call in script.named("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        if not script.uses_torch_distributed:
            yield found(call, f"{call.text} drives all GPUs from one process")
