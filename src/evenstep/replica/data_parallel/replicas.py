"""Replicas of a module that stay alive between steps, and a forward and backward pass through several of them.

[Note: a graph per replica]

Every replica has parameters of its own, leaves of its own graph, which share the original's memory where they are on
its device. So the outputs of a pass hang on as many graphs as there are replicas, and the caller sees one node
(`data_parallel._Replicated`) whose inputs are the original parameters. Its backward pass has every CPU replica's thread
differentiate its own graph: autograd alone runs a CPU graph in the one thread that called it.

Accelerators are the other way round. Autograd has a thread per device, and a call from our thread would wait for the
device's thread, which may be the one that is waiting for us. Their graphs are differentiated in one call from here,
which autograd distributes over its threads itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from evenstep.errors import ConfigurationError, UsageError
from evenstep.pytrees import Rebuild, flatten_tensors
from evenstep.replica.data_parallel.worker_threads import Surroundings, WorkerThreads

BUCKET_BYTES = 25 << 20


class Replica:
    """A copy of a module on a device.

    Args:
        device: Where.
        is_first: It writes into the original's buffers; others have copies, refreshed before every pass.
        shares_memory: Parameters on the same device share the original's memory; False for tests.
    """

    def __init__(self, device: torch.device, *, is_first: bool, shares_memory: bool = True) -> None:
        self.device = device
        self.module: nn.Module | None = None
        self.num_built = 0  # how often the copy was made
        self.num_copied = 0  # how many parameters were copied since
        self._is_first = is_first
        self._shares_memory = shares_memory
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}  # version and address of originals
        self._things: list[object] = []
        self._pairs: list[tuple[nn.Module, nn.Module]] = []

    def refresh(self, original: nn.Module) -> nn.Module:
        """Make the copy equal to the original, copying what has changed. Returns it."""
        things = list(_things_of(original))
        fresh = self.module is not None and len(things) == len(self._things)
        if not (fresh and all(map(operator.is_, things, self._things)) and self._refresh_parameters()):
            self._build(original)
            self._things = things
        self._refresh_buffers()
        assert self.module is not None
        return self.module

    def copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands for a parameter here."""
        return self._copies[parameter]

    def _build(self, original: nn.Module) -> None:
        if any(isinstance(parameter, UninitializedParameter) for parameter in original.parameters()):
            raise ConfigurationError(
                "DataParallel: a lazy layer has not seen a batch yet. Run one batch through `model.module` first."
            )
        made = {each: _without_tensors(each) for each in original.modules()}
        wanted = dict.fromkeys(original.parameters())
        self._copies = {p: copy for p, copy in self._copies.items() if p in wanted and self._is_current(p)}
        for parameter in wanted:
            if parameter not in self._copies:
                self._copies[parameter] = self._made_copy(parameter)
                self._seen[parameter] = (parameter._version, parameter.data_ptr())
        for each, copy in made.items():
            for name, child in each._modules.items():
                copy._modules[name] = None if child is None else made[child]
            for name, own in each._parameters.items():
                if own is None:
                    copy._parameters[name] = None
                else:
                    setattr(copy, name, self._copies[own])  # and not a dictionary entry: recurrent layers keep a list
            copy._buffers = each._buffers if self._is_first else {}
        self._pairs = list(made.items())
        self.module = made[original]
        self.num_built += 1

    def _made_copy(self, parameter: nn.Parameter) -> nn.Parameter:
        values = parameter.detach()
        if not self._shares(parameter):
            values = values.to(self.device, copy=True)
        copy = nn.Parameter(values, requires_grad=parameter.requires_grad)
        copy.__dict__.update(parameter.__dict__)
        self.num_copied += not self._shares(parameter)
        return copy

    def _shares(self, parameter: nn.Parameter) -> bool:
        return self._shares_memory and parameter.device == self.device

    def _is_current(self, parameter: nn.Parameter) -> bool:
        """Whether the copy can be kept: it shares the memory that the parameter has now, or can be written to."""
        copy = self._copies[parameter]
        if copy.shape != parameter.shape or copy.dtype is not parameter.dtype:
            return False
        return not self._shares(parameter) or copy.data_ptr() == parameter.data_ptr()

    def _refresh_parameters(self) -> bool:
        """Copy what has changed. Returns False if a new copy is needed."""
        stale: list[nn.Parameter] = []
        for parameter, copy in self._copies.items():
            if parameter.requires_grad is not copy.requires_grad:
                copy.requires_grad_(parameter.requires_grad)
            now = (parameter._version, parameter.data_ptr())
            if now != self._seen[parameter]:
                if not self._is_current(parameter):
                    return False
                self._seen[parameter] = now
                if not self._shares(parameter):
                    stale.append(parameter)
        for bucket in buckets_of(stale):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket]).to(self.device)
            parts = torch.split(flat, [parameter.numel() for parameter in bucket])
            with torch.no_grad():
                into: list[Tensor] = [self._copies[parameter] for parameter in bucket]
                torch._foreach_copy_(into, [part.view(p.shape) for part, p in zip(parts, bucket, strict=True)])
        self.num_copied += len(stale)
        return True

    def _refresh_buffers(self) -> None:
        """Copy all of them: batch normalisation changes its own without telling the version counter."""
        if self._is_first:
            return
        into: list[Tensor] = []
        values: list[Tensor] = []
        for original, copy in self._pairs:
            for name in copy._buffers.keys() - original._buffers.keys():
                del copy._buffers[name]
            for name, buffer in original._buffers.items():
                mine = copy._buffers.get(name)
                if buffer is None:
                    copy._buffers[name] = None
                elif (
                    mine is None or mine.shape != buffer.shape or mine.dtype is not buffer.dtype or mine.is_inference()
                ):
                    copy._buffers[name] = buffer.detach().to(self.device, copy=True)
                else:
                    into.append(mine.detach())
                    values.append(buffer.detach())
        if into:
            torch._foreach_copy_(into, values)


def _things_of(module: nn.Module) -> Iterator[object]:
    """Everything but buffers that a copy takes from its original; the same objects: nothing has changed."""
    for each in module.modules():
        yield each
        yield from each.__dict__.values()
        yield from each._parameters.values()
        yield from each._modules.values()


def _without_tensors(module: nn.Module) -> nn.Module:
    copy: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # torch's own hook: some modules have a say in it
    copy._parameters, copy._modules = {}, {}
    return copy


def buckets_of(tensors: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype together, up to `BUCKET_BYTES`, in order. Pure."""
    buckets: list[list[nn.Parameter]] = []
    open_bucket: dict[torch.dtype, list[nn.Parameter]] = {}
    for tensor in tensors:
        bucket = open_bucket.get(tensor.dtype)
        if bucket is None or sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES:
            bucket = open_bucket[tensor.dtype] = []
            buckets.append(bucket)
        bucket.append(tensor)
    return buckets


Call = Callable[[nn.Module, Any], Any]


class Run:
    """One forward pass through several replicas, and the backward pass that may follow.

    Args:
        replicas: Refreshed.
        workers: Their threads.
        dim: The batch dimension.
        home: Where outputs go.
        call: What each replica's thread does with its module and its part.
        tensors: Of the batch.
        rebuild: The batch again, out of tensors.
        length: Of the batch.
        parameters: The original's that are trained.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        workers: WorkerThreads,
        *,
        dim: int,
        home: torch.device,
        call: Call,
        tensors: Sequence[Tensor],
        rebuild: Rebuild,
        length: int,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.sizes = part_sizes(length, len(replicas))
        self.replicas = replicas[: len(self.sizes)]
        self.parameters = parameters
        self._workers, self._dim, self._home, self._call = workers, dim, home, call
        self._tensors, self._rebuild_inputs = tensors, rebuild
        self.inputs = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        self._inputs: list[list[Tensor]] = []  # [replica][differentiable input]
        self._outputs: list[list[Tensor]] | None = None  # [replica][output]
        self.rebuild: Rebuild = lambda given: None
        num_on_cpu = sum(replica.device.type == "cpu" for replica in self.replicas)
        self.num_threads = max(1, torch.get_num_threads() // max(1, num_on_cpu))

    def forward(self, *, grad: bool) -> list[Tensor]:
        """Run all replicas. Returns the tensors of the output, joined; `rebuild` makes the output of them."""
        parts = [divided(tensor.detach(), self.sizes, self._dim) for tensor in self._tensors]
        jobs = []
        for index, replica in enumerate(self.replicas):
            mine = [each[index].to(replica.device, non_blocking=True) for each in parts]
            if grad:
                for number in self.inputs:
                    mine[number] = mine[number].detach().requires_grad_()
                self._inputs.append([mine[number] for number in self.inputs])
            jobs.append(self._forward_job(replica, self._rebuild_inputs(mine)))
        with torch.set_grad_enabled(grad):
            around = Surroundings.here(num_threads=self.num_threads)
        results = self._workers.run(jobs, around, "forward")
        self.rebuild = results[0][1]
        outputs = [tensors for tensors, _ in results]
        if len({len(tensors) for tensors in outputs}) > 1:
            raise UsageError(f"DataParallel: the replicas returned {[len(each) for each in outputs]} tensors each.")
        if grad:
            self._outputs = outputs
        return [
            joined([each.detach().to(self._home, non_blocking=True) for each in row], self._dim)
            for row in zip(*outputs, strict=True)
        ]

    def _forward_job(self, replica: Replica, part: Any) -> Callable[[], tuple[list[Tensor], Rebuild]]:
        module = replica.module
        assert module is not None
        return lambda: flatten_tensors(self._call(module, part))

    @property
    def differentiable(self) -> list[bool]:
        """Of each output, whether it has a gradient on some replica."""
        assert self._outputs is not None
        return [any(each.requires_grad for each in row) for row in zip(*self._outputs, strict=True)]

    def backward(self, grads: Sequence[Tensor | None], *, keep_graph: bool) -> list[Tensor | None]:
        """Differentiate all replicas' graphs, and add up.

        Args:
            grads: Of the joined outputs.
            keep_graph: There will be another backward pass.

        Returns:
            The gradients of the batch's tensors that have one, and of the parameters.
        """
        if self._outputs is None:
            raise UsageError(
                "DataParallel: a second backward pass through the same outputs, whose graphs have been freed. Pass "
                "retain_graph=True to the first one."
            )
        work = [self._differentiation(index, grads) for index in range(len(self.replicas))]
        found: list[list[Tensor | None]] = [[None] * (len(self.inputs) + len(self.parameters)) for _ in self.replicas]
        elsewhere = [i for i, replica in enumerate(self.replicas) if replica.device.type != "cpu"]
        if elsewhere:
            outs, wrt, given = ([each for i in elsewhere for each in work[i][k]] for k in range(3))
            flat = _differentiate(outs, wrt, given, keep_graph)
            for position, i in enumerate(elsewhere):
                found[i] = flat[position * len(found[i]) : (position + 1) * len(found[i])]
        if len(elsewhere) < len(self.replicas):
            around = Surroundings.here(num_threads=self.num_threads)
            jobs = [
                (lambda: None) if i in elsewhere else _job(_differentiate, *work[i], keep_graph)
                for i in range(len(work))
            ]
            for i, result in enumerate(self._workers.run(jobs, around, "backward")):
                found[i] = found[i] if i in elsewhere else result
        if not keep_graph:
            self._outputs, self._inputs = None, []
        split = len(self.inputs)
        of_inputs = [self._joined_gradient(n, [each[k] for each in found]) for k, n in enumerate(self.inputs)]
        return of_inputs + self._add_up([each[split:] for each in found])

    def _differentiation(self, index: int, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor], Any]:
        """(outputs, with respect to what, gradients of the outputs) of one replica."""
        assert self._outputs is not None
        replica, outs, given = self.replicas[index], [], []
        for number, grad in enumerate(grads):
            out = self._outputs[index][number]
            if grad is None or not out.requires_grad:
                continue
            if out.dim() == 0:
                part = grad[index]
            else:
                lengths = [each[number].shape[self._dim] for each in self._outputs]
                part = grad.narrow(self._dim, sum(lengths[:index]), lengths[index])
            outs.append(out)
            given.append(part.to(replica.device, non_blocking=True))
        return outs, [*self._inputs[index], *(replica.copy_of(p) for p in self.parameters)], given

    def _joined_gradient(self, number: int, parts: list[Tensor | None]) -> Tensor | None:
        tensor = self._tensors[number]
        if all(part is None for part in parts):
            return None
        if not has_dimension(tensor, self._dim):
            there = [part.to(tensor.device) for part in parts if part is not None]
            return torch.stack(there).sum(0)
        pieces = divided(tensor.detach(), self.sizes, self._dim)
        filled = [torch.zeros_like(p) if g is None else g.to(tensor.device) for g, p in zip(parts, pieces, strict=True)]
        return torch.cat(filled, self._dim)

    def _add_up(self, found: list[list[Tensor | None]]) -> list[Tensor | None]:
        """The parameters' gradients, added over replicas in their order, a bucket at a time."""
        total: dict[nn.Parameter, Tensor | None] = {}
        by_parameter = dict(zip(self.parameters, zip(*found, strict=True), strict=True))
        dense: list[nn.Parameter] = []
        for parameter, grads in by_parameter.items():
            there = [grad for grad in grads if grad is not None]
            if len(there) == len(grads) > 1 and not any(grad.is_sparse for grad in there):
                dense.append(parameter)
            else:  # unused by some replicas, or sparse: few
                moved = [grad.to(parameter.device) for grad in there]
                total[parameter] = sum(moved[1:], moved[0]) if moved else None
        for number, bucket in enumerate(buckets_of(dense[::-1])):
            columns = [[by_parameter[p][i] for p in bucket] for i in range(len(self.replicas))]
            # On accelerators the buckets are added on one device after the other, and not all on the first.
            owner = self.replicas[number % len(self.replicas)].device
            total.update(zip(bucket, add_bucket(columns, owner, bucket[0].device), strict=True))
        return [total[parameter] for parameter in self.parameters]


def add_bucket(columns: Sequence[Sequence[Any]], owner: torch.device, home: torch.device) -> list[Tensor]:
    """The sums of gradients over replicas.

    Args:
        columns: [replica][parameter]; of one dtype, and of one device per replica.
        owner: Where they are added, if they are on several devices.
        home: Where the sums go.
    """
    if {column[0].device for column in columns} == {home}:
        # Into new memory: autograd may have given the same tensor to two parameters.
        total = torch._foreach_add(list(columns[0]), list(columns[1]))
        for column in columns[2:]:
            torch._foreach_add_(total, list(column))
        return list(total)
    flat = [torch.cat([grad.reshape(-1) for grad in column]).to(owner, non_blocking=True) for column in columns]
    for each in flat[1:]:
        flat[0].add_(each)
    parts = torch.split(flat[0].to(home), [grad.numel() for grad in columns[0]])
    return [part.view(grad.shape) for part, grad in zip(parts, columns[0], strict=True)]


def _differentiate(outs: list[Tensor], wrt: list[Tensor], given: list[Tensor], keep_graph: bool) -> list[Any]:
    if not outs or not wrt:
        return [None] * len(wrt)
    return list(torch.autograd.grad(outs, wrt, given, retain_graph=keep_graph, allow_unused=True))


def _job(fn: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: fn(*arguments)


def batch_size(tensors: Sequence[Tensor], dim: int) -> int | None:
    """How long tensors are in the batch dimension; None if none has one. Pure.

    Raises:
        ConfigurationError: They are of different lengths.
    """
    lengths = {tensor.shape[dim] for tensor in tensors if has_dimension(tensor, dim)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"DataParallel: the batch has tensors of lengths {sorted(lengths)} in dimension {dim}, along which it is "
            f"divided. Give what belongs to the whole batch to the module as a buffer, or as a 0-dim tensor."
        )
    return lengths.pop() if lengths else None


def has_dimension(tensor: Tensor, dim: int) -> bool:
    """Whether a tensor is divided along a dimension; others go to every replica whole."""
    return tensor.dim() > dim if dim >= 0 else tensor.dim() >= -dim


def part_sizes(length: int, num_parts: int) -> list[int]:
    """Sizes that differ by at most one, none of them 0; fewer than `num_parts` if there aren't enough. Pure."""
    num_parts = min(num_parts, length)
    return [length // num_parts + (index < length % num_parts) for index in range(num_parts)]


def divided(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """A tensor in parts of these sizes; one without the dimension as often as there are parts."""
    return list(torch.split(tensor, list(sizes), dim)) if has_dimension(tensor, dim) else [tensor] * len(sizes)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts one after the other; numbers (0-dim) become [len(parts)]."""
    if parts[0].dim() == 0:
        return torch.stack(list(parts))
    return torch.cat(list(parts), dim)
