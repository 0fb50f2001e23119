"""replicas differ (error).

Ranks join a process group, and nothing exchanges gradients: no wrapper, no collective in the loop. Or the weights of a
wrapped model are changed on each rank by itself.

Every rank trains a model of its own on its part of the data, and nothing says so.

A run compares the parameters of all ranks after two steps. It leaves out sharded parameters, those that didn't change,
LocalSGD, and scripts that make groups of ranks or send from rank to rank.

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

from evenstep.tools.doctor.asking import (
    Call,
    Found,
    Script,
    assignments_to,
    behind,
    dotted,
    found,
    has_wrapped,
    models_of,
)
from evenstep.tools.doctor.scene import Scene, Seen, replicas_differ

COMPARED = ("drift",)
_EXCHANGES: tuple[str, ...] = (
    "fully_shard",
    "parallelize_module",
    "parallelize",
    "attach",
    "replicate",
    "PipelineStage",
)
_EXCHANGES += ("DistributedDataParallel", "FullyShardedDataParallel", "register_hook", "rpc")
_EXCHANGES += ("register_post_accumulate_grad_hook", "send", "recv", "isend", "irecv", "batch_isend_irecv")
_EXCHANGES += ("PeriodicModelAverager", "PostLocalSGDOptimizer")
_LIBRARIES: tuple[str, ...] = ("deepspeed", "horovod", "megatron", "fairscale", "colossalai", "apex", "lightning")
_LIBRARIES += ("accelerate", "evenstep", "pytorch_lightning", "lightning_fabric", "torchtitan")
_PARAMETERS = r"(?i)grad|param|state|model|module|weight|flat|buffer|net\b"


def read(script: Script) -> Found:
    """A process group, a model and an optimizer that are known, and nothing between ranks that touches gradients."""
    if not script.named("torch.distributed.init_process_group") or script.uses(*_EXCHANGES) or has_wrapped(script):
        return
    sends = [call for call in script.calls if call.name.startswith("torch.distributed.")]
    given = [(call, each) for call in sends for each in call.arguments]
    if any(map(script.imports, _LIBRARIES)) or any(behind(script, e, c.frame, _PARAMETERS, 1) for c, e in given):
        return
    for step in script.step_calls:
        optimizers = script.makers(script.values(step.receiver, step.frame), "optimizer")
        around = script.loops_around(step.frame)[:1]
        passes = [each for each in script.backward_calls if set(around) & set(script.loops_around(each.frame))]
        if optimizers and passes and all(_is_of_a_known_model(script, each) for each in optimizers):
            yield found(passes[0], f"{passes[0].text} leaves each rank with gradients of its own")
            return


def seen(run: Scene) -> Seen:
    """Parameters that differ after two steps, without a wrapper, or though all passes went through it."""
    passes = [each for each in run.evidence.all("backward") if each.places]
    around = any(each["grad"] and not each["wrapped"] for each in run.evidence.all("forward"))
    evidence = replicas_differ(run) if passes and not (run.wrapper and around) else ""
    if evidence:
        yield run.finding(passes[0].place, evidence)


def _is_of_a_known_model(script: Script, optimizer: Call) -> bool:
    """True if an optimizer has the parameters of a model that only functions of the script, or torch's, were given."""
    model = next(iter(models_of(optimizer)), "")
    values = assignments_to(script, model, optimizer.frame)
    if not values or not all(script.kinds(each.value, each.frame) & {"model", "instance"} for each in values):
        return False
    plain = ("torch.", "print", "len", "sum", "isinstance")
    strangers = [each for each in script.calls if not script.functions_of(each) and not each.name.startswith(plain)]
    return not any(dotted(given) == model for each in strangers for given in each.arguments)
