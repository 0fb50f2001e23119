"""Records what a watched rank does as events: passes, steps, collectives, loaders, saved files."""

from __future__ import annotations

import dis
import gc
import itertools
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import get_worker_info

from evenstep.ground.environment import export, meeting_point
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.tools.doctor.run.events import Place
from evenstep.tools.doctor.run.samples import facts_of, first_looks, row_digests, streams_of
from evenstep.tools.doctor.run.writer import Writer
from evenstep.tools.observing.graphs import factor_of, is_mean
from evenstep.tools.observing.models import digest, is_trained
from evenstep.tools.observing.record import Ended, Instead, Loop, Subscriber
from evenstep.tools.observing.script import caller

_IN_PARTS = re.compile(r"LocalSGD|ModelAverager|FullySharded|FSDP|PipelineStage|DTensor")
_MOST_LOOKS = 2  # steps of an optimizer in which its parameters are compared with those of modules
_MOST_EVALUATED = 8  # batches, after which a loop without steps is cut
_MOST_FETCHES = 4  # recorded fetches of a worker


class Notes(Subscriber):
    """Records what this process does, and ends its epochs early.

    Args:
        writer: Writes the events.
        stepped: Called after every step of the optimizer that counts steps.
    """

    def __init__(self, writer: Writer, stepped: Callable[[], object]) -> None:
        self._writer, self._stepped = writer, stepped
        self._used: set[nn.Module] = set()  # wrappers whose forward has run since the last backward pass
        self._counts: Counter[int] = Counter()  # by id of an optimizer, its steps
        self._looked: set[tuple[int, int]] = set()
        # Models of outermost passes, numbered in the order of their first pass. References are weak, because no model
        # may outlive its process group.
        self._models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._model_numbers = itertools.count()
        self._launched = meeting_point()
        self._has_spawned = False
        self._loaders: weakref.WeakKeyDictionary[Any, tuple[int, itertools.count[int]]] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._made: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()
        self._loops: weakref.WeakKeyDictionary[Loop, dict[str, int]] = weakref.WeakKeyDictionary()
        self._fetches: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
        # The steps fill two epochs.
        self._steps_of_epoch = max(1, -(-writer.plan.num_steps // 2))

    # ------------------------------------------------------------------ a step

    def module(self, module: Any, args: Any, kwargs: Any, depth: int) -> Ended:
        """See base class."""
        is_wrapper = isinstance(module, TorchDistributedDataParallel)
        if not is_wrapper and (depth or not is_trained(module)):
            return None
        grad = torch.is_grad_enabled()
        rows = row_digests((args, kwargs)) if grad else []
        self._writer.note("forward", wrapped=is_wrapper, grad=grad, rows=rows)
        if grad and self._writer.num_steps in (0, 2):
            self._look_at(module)
        if not is_wrapper:
            return None
        if grad:
            self._used.add(module)
        # torch's wrapper broadcasts rank 0's buffers before the pass, also in an evaluation. After the first step, its
        # replicas agree on the order of buckets.
        sends = getattr(module, "broadcast_buffers", False) and any(True for _ in module.buffers())
        syncs = bool(module.require_backward_grad_sync) and (grad or sends)
        return self._writer.enter("forward of the model") if syncs else None

    def _look_at(self, module: nn.Module) -> None:
        """Record digests of a model's trained parameters, before step 1 and after step 2. Sharded ones are left out."""
        if module not in self._models:
            self._models[module] = next(self._model_numbers)
        model, when = self._models[module], self._writer.num_steps // 2
        if (model, when) in self._looked or any(map(_is_in_parts, module.modules())):
            return
        self._looked.add((model, when))
        if when and any(map(_is_in_parts, gc.get_objects())):
            self._writer.note("apart", what="parameters")
        named = {name.removeprefix("module."): p for name, p in module.named_parameters() if p.requires_grad}
        plain = {name: digest(p) for name, p in named.items() if type(p.data) is Tensor and p.numel()}
        self._writer.note("parameters", model=model, when=when, digests=plain)

    def part(self, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        self._writer.note("apart", what="groups of ranks, or messages")

    def backward(self, root: Any, weight: Any, scale: float) -> Ended:
        """See base class."""
        used, self._used = self._used, set()
        syncs = any(bool(each.require_backward_grad_sync) for each in used)
        leave = self._writer.enter("gradients of the model") if syncs else None
        places = self._writer.script.places()
        factor, node = (1.0, None) if root is None else factor_of(root, scale)  # before its tensors are freed
        is_sum = node is not None and node.name().startswith("Sum")
        facts = {"synced": syncs, "wrapped": bool(used), "weighted": weight is not None, "factor": factor}
        facts |= {"is_mean": is_mean(node), "is_sum": is_sum}

        def ended() -> None:
            if leave is not None:
                leave()
            self._writer.write("backward", places, facts)

        return ended

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        """See base class."""
        self._counts[id(optimizer)] += 1
        facts = replaced(optimizer) if self._counts[id(optimizer)] <= _MOST_LOOKS else {}
        self._writer.note("stepped" if is_counted else "stepped again", **facts)
        if is_counted:
            self._writer.num_steps = self.recorder.num_steps
            self._stepped()

    def loss(self, input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        if torch.is_grad_enabled() and isinstance(target, Tensor) and not target.is_floating_point():
            ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
            reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
            valid = int((target != ignored).sum())
            self._writer.note("loss", valid=valid, labels=target.numel(), reduction=reduction)

    def batch_norm(self, input: Any, mean: Any = None, var: Any = None, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        if kwargs.get("training", args[2] if len(args) > 2 else False) and torch.is_grad_enabled():
            self._writer.note("norm", rows=int(input.shape[0]))

    # ------------------------------------------------------------------ what all ranks do together

    def collective(self, op: str, args: Any, kwargs: Any) -> Ended:
        """See base class."""
        group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        is_world = group is None or group is dist.GroupMember.WORLD
        return self._writer.enter(op, group="" if is_world else str(getattr(group, "group_name", "")))

    def makes_group(self, arguments: dict[str, Any]) -> Ended:
        """See base class."""
        by_script = bool(self._writer.script.own_file(caller().f_code.co_filename))
        init_method = arguments.get("init_method")
        port = self._fixed_port(init_method)
        if port is not None or (self._has_spawned and (init_method or arguments.get("store") is not None)):
            # The launcher has its own store, so the script would wait in vain for one at its own port. And a file or
            # store that the script made before it starts its ranks is another one in each process here.
            for name in ("init_method", "store", "rank", "world_size"):
                arguments.pop(name, None)
            export(self._launched)
        self._writer.note("init", port=port, by_script=by_script)
        return self._writer.enter("init_process_group")

    def _fixed_port(self, init_method: Any) -> str | None:
        """The port that the script itself sets; None if it uses the launcher's."""
        if isinstance(init_method, str) and init_method.startswith("tcp://"):
            return init_method.rpartition(":")[2]
        port = meeting_point().get("MASTER_PORT")
        return port if port != self._launched.get("MASTER_PORT") else None

    def ends_group(self) -> None:
        """See base class."""
        self._writer.note("destroy")

    def wrap(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Ended:
        """See base class."""
        leave = self._writer.enter("DistributedDataParallel")
        trained = [p for p in module.parameters() if p.requires_grad]

        def made() -> None:
            leave()
            self._writer.note(
                "wrapped",
                wrapper="evenstep" if isinstance(wrapper, DistributedDataParallel) else "torch",
                num_bytes=sum(p.numel() * p.element_size() for p in trained),
            )

        return made

    def join(self, join: Any) -> None:
        """See base class."""
        self._writer.note("join")

    def spawn(self, fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **named: Any) -> Ended:
        """Run the spawned function in this process as this rank: each rank of doctor's run has started the script."""
        self._writer.note("spawns", num_ranks=nprocs)
        self._has_spawned = True
        if nprocs != self._writer.plan.world_size:
            raise SystemExit(0)
        return Instead(lambda *_, **__: fn(self._writer.rank, *args))

    # ------------------------------------------------------------------ data and files

    def save(self, obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        path = os.path.abspath(f) if isinstance(f, str | os.PathLike) else ""
        self._writer.note("save", path=path, has_prefix=has_prefix(obj))

    def loader(self, loader: Any, *args: Any, **kwargs: Any) -> None:
        """See base class."""
        self._made.setdefault(loader, self._writer.script.places()[:1])

    def loop_begins(self, loop: Loop) -> None:
        """Record the loader, and for its first loop three samples of the data set."""
        loader = loop.loader
        if loader not in self._loaders:
            self._loaders[loader] = next(self._numbers), itertools.count()
        number, counts = self._loaders[loader]
        self._loops[loop] = {"loader": number, "iteration": next(counts)}
        facts = facts_of(loader) | ({} if self._loops[loop]["iteration"] else first_looks(loader))
        self._writer.note("iterate", **self._loops[loop], made=self._made.get(loader, []), **facts)

    def cuts(self, loop: Loop) -> bool:
        """End an epoch after half of the watched steps, if the script's loop expects an end."""
        made = self.recorder.num_steps - loop.steps_before
        if self._writer.is_over:
            enough = loop.num_batches >= 1
        elif made:
            enough = made >= self._steps_of_epoch
        else:
            enough = loop.num_batches >= _MOST_EVALUATED and self.recorder.num_steps > 0
        return enough and self._is_in_a_for()

    def _is_in_a_for(self) -> bool:
        """Whether a `for` or a library requests the next batch: `next` in the script may not expect an end."""
        frame = caller()
        if not self._writer.script.own_file(frame.f_code.co_filename):
            return True
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"

    def batch(self, loop: Loop, batch: Any) -> None:
        """Record digests of the samples."""
        self._writer.write("batch", [], {**self._loops[loop], "rows": row_digests(batch)})

    def loop_ended(self, loop: Loop, *, is_cut: bool) -> None:
        """See base class."""
        self._writer.write("iterated", [], {**self._loops[loop], "num_batches": loop.num_batches, "cut": is_cut})

    def fetch(self, fetcher: Any, index: Any) -> Ended:
        """Record which random streams are drawn from while samples are loaded, in the rank and in forked workers."""
        number = next(self._fetches.setdefault(fetcher, itertools.count()))
        if number >= _MOST_FETCHES:
            return None
        worker, before = get_worker_info(), streams_of(fetcher.dataset)
        facts = {"worker": -1 if worker is None else worker.id, "dataset": id(fetcher.dataset), "number": number}

        def ended() -> None:
            after = streams_of(fetcher.dataset)
            moved = {name: state for name, state in before.items() if after.get(name) != state}
            self._writer.write("fetch", [], {**facts, "streams": moved})

        return ended


def _is_in_parts(thing: object) -> bool:
    """Whether an object shards a model, or lets replicas drift for some steps."""
    return _IN_PARTS.search(type(thing).__name__) is not None


def replaced(optimizer: Any) -> dict[str, int]:
    """The numbers of an optimizer's parameters that no module has, and of those with gradients in no optimizer."""
    owned: set[int] = set()
    trained: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # `isinstance` would follow weak proxies, whose objects may be gone
        if issubclass(kind, nn.Module):
            trained |= {id(p): p for p in vars(thing).get("_parameters", {}).values() if p is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            groups = getattr(thing, "param_groups", ())  # missing if its constructor raised
            owned |= {id(p) for group in groups for p in group["params"]}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "stale": sum(id(p) not in trained and p.grad is None for p in stepped),
        "untrained": sum(key not in owned and p.requires_grad and p.grad is not None for key, p in trained.items()),
    }


def has_prefix(saved: Any, depth: int = 2) -> bool:
    """Whether a checkpoint holds a wrapper's state: all names of tensors begin with `module.`. Pure."""
    if not isinstance(saved, Mapping):
        return False
    names = [name for name, value in saved.items() if isinstance(value, Tensor)]
    if names and all(isinstance(name, str) and name.startswith("module.") for name in names):
        return True
    return depth > 0 and any(has_prefix(value, depth - 1) for value in saved.values())
