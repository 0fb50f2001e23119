"""Copies of a module, each with its own thread, and a forward and backward pass through them.

[Note: a graph per replica]

Every replica has its own parameters, which are leaves of its own graph. On the original's device they share the
original's memory. So a pass has as many graphs as there are replicas, and the caller's graph has one node for all of
them (`_Replicated`). The node's inputs are the parts of the batch and the parameters; its results are the outputs of
each replica. Outside of the node autograd splits the batch, joins the outputs and adds up the gradients.

In the node's backward pass every CPU replica's thread differentiates its own graph: in one call, autograd would run all
CPU graphs in the calling thread.

On accelerators autograd has a thread per device. A call from a replica's thread would wait for the device's thread,
which may be waiting for that call. So the accelerators' graphs are differentiated in one call from the node, and
autograd distributes the work over its threads.

[Note: what is kept between passes]

Two things are kept: the threads, and copies of unchanged parameters on devices other than the first. Module objects are
copied shallowly in every pass, so a replica follows every change of the original.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evenstep.errors import UsageError
from evenstep.ground.compat.c_library.openmp import rest_team
from evenstep.ground.compat.torch_autograd import keeps_graph, outside_inference_mode
from evenstep.ground.compat.torch_tensors import flatten_dense, unflatten_dense
from evenstep.ground.computing.pytrees import Rebuild, flatten_tensors


class Replica:
    """A replica's thread and copies of parameters, kept between passes.

    Args:
        index: The replica's number. The first replica writes to the original's module buffers, others have copies.
        device: The replica's device.
        home: The original's device. A replica on that device shares the parameters' memory.
    """

    def __init__(self, index: int, device: torch.device, home: torch.device) -> None:
        self.index, self.device = index, device
        self.shares_memory = device == home
        # A thread for each replica, which keeps its OpenMP team, or its device's handles.
        self.thread = ThreadPoolExecutor(1, f"evenstep-replica-{index}")
        self._values: dict[tuple[nn.Parameter, int, int], Tensor] = {}  # by parameter, version and address

    def copy_of(self, original: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
        """Return a copy of a module on this device, and the replacement of each of its parameters."""
        # Copies made in inference mode couldn't be trained by a later pass.
        with outside_inference_mode(), torch.no_grad():
            leaves = self._leaves(list(original.parameters()))
            made: dict[Any, Any] = {None: None}
            for each in original.modules():
                made[each] = each._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # torch's own hook: some modules have a say in it
            for each in original.modules():
                self._fill(made[each], each, made, leaves)
        return made[original], list(leaves.values())

    def _fill(self, copy: nn.Module, original: nn.Module, made: dict[Any, Any], leaves: dict[Any, Any]) -> None:
        # Set each entry, and parameters also as attributes: scripted modules store them elsewhere, recurrent modules
        # also in a list.
        for name, child in original._modules.items():
            copy._modules[name] = made[child]
        for name, parameter in original._parameters.items():
            setattr(copy, name, leaves.get(parameter))
        if self.index == 0:
            copy._buffers = original._buffers
        else:
            # Copy buffers in every pass: batch normalisation changes its buffers without increasing the version
            # counter.
            for name, buffer in original._buffers.items():
                copy._buffers[name] = None if buffer is None else buffer.detach().to(self.device, copy=True)

    def _leaves(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        keys = [(parameter, parameter._version, parameter.data_ptr()) for parameter in parameters]
        stale = [key for key in keys if key not in self._values]
        values: list[Any] = [parameter.detach() for parameter, _, _ in stale]
        if not self.shares_memory:
            values = carried(values, self.device)
        found = self._values | dict(zip(stale, values, strict=True))
        self._values = {key: found[key] for key in keys}
        leaves = {}
        for parameter, value in zip(parameters, self._values.values(), strict=True):
            leaves[parameter] = nn.Parameter(value, parameter.requires_grad)
            leaves[parameter].__dict__.update(parameter.__dict__)
        return leaves


def carried(tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Copies of tensors on a device, with the same strides. Dense tensors of a dtype are sent as one tensor."""
    made = [t if t is None else t.to(device) if t.is_sparse else torch.empty_like(t, device=device) for t in tensors]
    dense: Any = [(t, copy) for t, copy in zip(tensors, made, strict=True) if t is not None and not t.is_sparse]
    for dtype in {tensor.dtype for tensor, _ in dense}:
        group, copies = zip(*(pair for pair in dense if pair[0].dtype is dtype), strict=True)
        torch._foreach_copy_(copies, unflatten_dense(flatten_dense(group).to(device), group))  # type: ignore[no-untyped-call]
    return made


Job = Callable[[], Any]


class Replicas:
    """All replicas of a model.

    Args:
        devices: Each replica's device; the original is on the first.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.home = devices[0]
        self.on_cpu = all(device.type == "cpu" for device in devices)
        self.members = [Replica(index, device, self.home) for index, device in enumerate(devices)]

    def forward(self, original: nn.Module, parts: Sequence[Sequence[Tensor]], rebuild: Rebuild) -> tuple[Any, Rebuild]:
        """Run a replica on each part of a batch.

        Args:
            original: The module.
            parts: [replica][tensor]; tensors that require a gradient are on the original's device.
            rebuild: Builds (arguments, keyword arguments) from a part's tensors.

        Returns:
            The tensors of the outputs, [replica][tensor], in the caller's graph; and a function that builds an output
            from a replica's tensors.

        Raises:
            UsageError: The replicas have returned different numbers of tensors.
            Exception: The exception of the first replica that raised one: see `run`.
        """
        jobs, leaves, sources = [], [], []
        for replica, part in zip(self.members, parts, strict=False):
            module, copies = replica.copy_of(original)
            inputs = [sent(each.detach(), replica.device).requires_grad_(each.requires_grad) for each in part]
            arguments, options = rebuild(inputs)
            jobs.append(functools.partial(module, *arguments, **options))
            leaves.append(_with_grad([*inputs, *copies]))
            sources += _with_grad([*part, *original.parameters()])
        outputs, rebuilds = zip(*map(flatten_tensors, self.run("forward", jobs)), strict=True)
        counts = [len(each) for each in outputs]
        if len(set(counts)) > 1:
            raise UsageError(f"DataParallel: the replicas returned different numbers of tensors: {counts}.")
        if sources and torch.is_grad_enabled():
            flat = iter(_Replicated.apply(self, outputs, leaves, *sources))  # type: ignore[no-untyped-call]
            outputs = tuple(list(itertools.islice(flat, count)) for count in counts)
        return outputs, rebuilds[0]

    def backward(self, outputs: Any, leaves: Any, grads: Iterator[Any], *, keep_graph: bool) -> Iterator[Tensor | None]:
        """Differentiate the replicas' graphs.

        Args:
            outputs: The replicas' outputs, [replica][tensor].
            leaves: The leaves of the replicas' graphs, [replica][leaf].
            grads: Gradients of all outputs; None for an output that the loss doesn't use.
            keep_graph: Keep the graphs for another backward pass.

        Returns:
            The gradients of all leaves, on the original's device.
        """
        work = []
        for own, own_leaves in zip(outputs, leaves, strict=True):
            pairs = [(out, next(grads)) for out in own]
            work.append(([pair for pair in pairs if pair[1] is not None], own_leaves))
        if self.on_cpu:
            found = self.run("backward", [functools.partial(_differentiate, *each, keep_graph) for each in work])
            return itertools.chain(*found)
        pairs, all_leaves = (list(itertools.chain(*each)) for each in zip(*work, strict=True))
        flat = iter(_differentiate(pairs, all_leaves, keep_graph))
        moved: list[Tensor | None] = []
        for replica, own_leaves in zip(self.members, leaves, strict=False):
            of_replica = list(itertools.islice(flat, len(own_leaves)))
            moved += of_replica if replica.shares_memory else carried(of_replica, self.home)
        return iter(moved)

    def run(self, doing: str, jobs: Sequence[Job]) -> list[Any]:
        """Do one job in each of the first `len(jobs)` replicas' threads at the same time, and wait for all of them.

        Args:
            doing: A word for messages, such as "forward".
            jobs: One per replica. They run with the calling thread's modes, and with its number of threads divided by
                the number of jobs.

        Raises:
            Exception: The exception of the first replica that raised one: of the same type if possible, with the
                replica and its device in the message.
        """
        num_threads = torch.get_num_threads()
        if self.on_cpu:
            rest_team()
            num_threads = max(1, num_threads // len(jobs))
        futures = [
            replica.thread.submit(_inheriting(job, replica.device, num_threads))
            for replica, job in zip(self.members, jobs, strict=False)
        ]
        errors = [future.exception() for future in futures]
        if torch.get_num_threads() != num_threads:
            # Restore the number: a thread that sets its number of OpenMP threads also sets that of threads that start
            # later.
            torch.set_num_threads(torch.get_num_threads())
        for replica, error in zip(self.members, errors, strict=False):
            if error is not None:
                place = f"replica {replica.index} of {len(self.members)}, on {replica.device}"
                raise _located(error, f"in the {doing} of {place}") from error
        return [future.result() for future in futures]


class _Replicated(torch.autograd.Function):
    """A node of the caller's graph that stands for all replicas."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, outputs: Any, leaves: Any, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas, ctx.graphs = replicas, (outputs, leaves)
        ctx.set_materialize_grads(False)
        detached = [(out.detach(), out.requires_grad) for each in outputs for out in each]
        ctx.mark_non_differentiable(*(out for out, has_grad in detached if not has_grad))
        return tuple(out for out, _ in detached)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs, keep_graph = ctx.graphs, keeps_graph()
        if graphs is None:
            raise UsageError(
                "DataParallel: a second backward pass through the same outputs, but the first one has freed their "
                "graphs. Pass retain_graph=True to the first backward pass."
            )
        if not keep_graph:
            ctx.graphs = None  # else the graphs would live as long as the caller's graph
        return None, None, None, *ctx.replicas.backward(*graphs, iter(grads), keep_graph=keep_graph)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the batch to a device.

    The copy is asynchronous, except to the CPU, where code might read it too early.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def _with_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _differentiate(pairs: Any, leaves: Any, keep_graph: bool) -> Any:
    outs, grads = [out for out, _ in pairs], [grad for _, grad in pairs]
    return torch.autograd.grad(outs, leaves, grads, retain_graph=keep_graph, allow_unused=True)


def _inheriting(job: Job, device: torch.device, num_threads: int) -> Job:
    """Wrap a job for another thread, so that it runs with modes of this thread that a thread doesn't inherit."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kind = device.type
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    stream = torch.cuda.current_stream(device) if kind == "cuda" else None

    def do() -> Any:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if stream is not None:
            torch.cuda.set_stream(stream)  # sets its device, too
            stream.query()  # gives a new thread a context; cuBLAS would warn without one
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            return job()

    return do


def _located(error: BaseException, where: str) -> BaseException:
    """Make an exception of the same type whose text also names the place where it was raised."""
    message = f"{error} ({where})"
    try:
        return type(error)(message)
    except Exception:  # the type's constructor takes other arguments
        return RuntimeError(f"{type(error).__name__}: {message}")
