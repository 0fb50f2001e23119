"""A bucket's memory: one flat tensor, and the gradients as views of it.

[Note: gradients that can be differentiated]

After `backward(create_graph=True)` a gradient has a graph. If gradients were copied with their graphs, each step would
append its graph to the views' graph, as long as the bucket lives. So the bucket's tensor has no graph, and the tensor
that becomes `p.grad` isn't a view: its value is the mean over ranks, and its derivative is that of this rank's own
mean. A second pass, such as a penalty's, averages that derivative over ranks, which gives the derivative of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.ground.compat.torch_profiler import begin_event, is_profiled
from evenstep.replica.gradients.buckets.layout import BucketLayout
from evenstep.transport.base import Collective, Row, Work
from evenstep.transport.core.transport import Transport

HALF_PRECISION = (torch.float16, torch.bfloat16)

_COARSE_NUMEL = 16 << 10  # gradients with at least this many elements get a call each


@dataclass(frozen=True)
class BucketMemory:
    """The flat tensors of a bucket. If 16-bit gradients are averaged in float32, only the final mean is rounded.

    Attributes:
        flat: [numel], this rank's gradients, in the dtype in which they are sent, added and divided.
        reduced: This rank's part of the sum over ranks: `flat` itself, or its shard.
        mean: The mean in the parameters' dtype: `reduced` itself, or a tensor of the same length.
    """

    flat: Tensor
    reduced: Tensor
    mean: Tensor


def whole_memory(layout: BucketLayout, dtype: torch.dtype, allocator: Transport) -> BucketMemory:
    """Memory of a bucket that isn't sharded: every rank has the whole mean, in the gradients' dtype."""
    flat = allocator.allocate(layout.numel, dtype=layout.dtype, device=layout.device)
    is_cast = dtype is not layout.dtype
    return BucketMemory(flat, flat, torch.zeros(layout.numel, dtype=dtype, device=layout.device) if is_cast else flat)


class Bucket:
    """Gradients of several parameters in one flat tensor, which is sent as a whole.

    Args:
        layout: The place of each parameter.
        parameters: All trained parameters: those with dense gradients in registration order, then those with sparse
            gradients.
        names: The parameters' names, for messages.
        transport: Carries the memory.
        memory: The bucket's memory, as from `whole_memory`.

    Attributes:
        sent_views: For each slot, a view of `flat`, from which the gradient is sent.
        views: For each slot, a tensor to which autograd may add: a view of the mean, or of `flat` if the mean is
            sharded.
        shown: For each slot, the tensor that becomes `p.grad` when the bucket is packed.
        is_full: Whether all the bucket's parameters had a gradient when it was packed.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        transport: Transport,
        memory: BucketMemory,
    ) -> None:
        self.layout = layout
        self.flat, self.reduced, self.mean = memory.flat, memory.reduced, memory.mean
        self.parameters = [parameters[slot.parameter] for slot in layout.slots]
        self.names = [names[slot.parameter] for slot in layout.slots]
        self.sent_views = self.views = views_of(self.flat, layout, self.parameters)
        if self.reduced is self.flat and self.mean is not self.flat:
            self.views = views_of(self.mean, layout, self.parameters)
        self.shown: Sequence[Tensor] = self.views
        # The views' addresses show whether a parameter was moved: torch moves its gradient with it.
        self._addresses_of_views = [view.data_ptr() for view in self.views]
        self.work: Work | None = None
        self.is_full = False
        self._end_range = _nothing
        self._graphs: list[tuple[nn.Parameter, Tensor]] = []  # see [Note: gradients that can be differentiated]
        self._version = 0
        self.transport = transport

    @property
    def hides(self) -> bool:
        """Whether `p.grad` doesn't show the reduced gradients."""
        return self.shown is not self.views

    @property
    def overflows(self) -> bool:
        """Whether gradients travel in float16, so that a sum over ranks may overflow."""
        return self.layout.dtype is torch.float16

    @property
    def _is_coarse(self) -> bool:
        return self.layout.device.type == "cpu" and self.layout.numel >= _COARSE_NUMEL * len(self.layout.slots)

    @property
    def is_clear(self) -> bool:
        """Whether all gradients are views and are known to be zero, without waiting for a GPU."""
        return all(p.grad is view for p, view in zip(self.parameters, self.views, strict=True)) and self.is_zero

    @property
    def is_zero(self) -> bool:
        """Whether all views are known to be zero, without waiting for a GPU."""
        return self.mean.device.type == "cpu" and not self.mean.any()

    def pack(self, divide_by: float = 1.0, totals: list[float] | None = None) -> None:
        """Make the flat tensor hold this rank's gradients, and set `p.grad` to `shown`.

        Gradients that are views of the flat tensor stay in place, and the others are copied in one batch. If a
        parameter has no gradient, its view is zeroed and `p.grad` stays None.

        Args:
            divide_by: Divisor of the gradients as they are copied.
            totals: Filled with sums of all elements, which are finite if the elements are. Large gradients are added up
                as soon as they have been copied, while they are in the cache.
        """
        grads = [parameter.grad for parameter in self.parameters]
        into: list[Tensor] = []
        what: list[Tensor] = []
        there: list[Tensor] = []
        self.is_full = True
        for index, (grad, view, sent) in enumerate(zip(grads, self.views, self.sent_views, strict=True)):
            if grad is None:
                self.is_full = False
                sent.zero_()
                continue
            if grad is view and view.data_ptr() != self._addresses_of_views[index]:
                raise moved_parameter([self.names[index]])
            if grad is sent:
                there.append(sent)
            else:
                into.append(sent)
                what.append(grad)
        self._graphs = []
        if torch.is_grad_enabled():  # in a pass with create_graph=True, or after any pass
            both = zip(self.parameters, grads, strict=True)
            self._graphs = [(parameter, grad) for parameter, grad in both if grad is not None and grad.requires_grad]
            if self._graphs:
                what = [grad.detach() for grad in what]
        self._fill(into, what, there, divide_by, totals)
        for index, (parameter, grad, shown) in enumerate(zip(self.parameters, grads, self.shown, strict=True)):
            if grad is not None and grad is not shown:
                try:
                    parameter.grad = shown
                except RuntimeError:
                    raise self._converted(index) from None

    def _converted(self, index: int) -> UsageError:
        """The error for a parameter, by number of its slot, whose `p.grad` can't be set to its gradient."""
        now, then = self.parameters[index], self.shown[index]
        return UsageError(
            f"parameter {self.names[index]!r} is {str(now.dtype)[6:]} {list(now.shape)} on {now.device} now, and was "
            f"{str(then.dtype)[6:]} {list(then.shape)} on {then.device} when the model was wrapped. Convert or move a "
            f"model before wrapping it."
        )

    def _fill(
        self,
        into: list[Tensor],
        what: list[Tensor],
        there: list[Tensor],
        divide_by: float,
        totals: list[float] | None,
    ) -> None:
        """Copy gradients to their places in `flat`, and divide all of them, also those that were there before."""
        if (
            self._is_coarse
            and divide_by == 1.0
            and totals is not None
            and all(grad.layout is torch.strided and grad.dtype is self.flat.dtype for grad in what)
        ):
            for view, grad in zip(into, what, strict=True):
                view.copy_(grad)
                totals.append(total_of(view))
            totals += map(total_of, there)
            return
        if into:
            self._copy(into, what)
        if divide_by != 1.0:
            self.flat.div_(divide_by)
        if totals is not None:
            totals.append(total_of(self.flat))

    def launch(self, row: Row | None, plain: float, beside: Tensor | None = None) -> None:
        """Start adding the flat tensor over ranks. The transport divides the sum too, if it `divides`.

        Args:
            row: See `Collective`.
            plain: See `Collective`.
            beside: See `Collective`.
        """
        self._begin_travel()
        kind = "all_reduce" if self.reduced is self.flat else "reduce_scatter"
        call = Collective(kind, self.flat, self.reduced, "sum", beside=beside, row=row, plain=plain)
        self.work = self.transport.run(call)

    def launch_hook(self, submit: Callable[[Bucket], Work]) -> None:
        """Like `launch`, but a communication hook averages the bucket; `submit` queues the bucket."""
        self._begin_travel()
        self.work = submit(self)

    def _begin_travel(self) -> None:
        self._version = self._versions()
        self._end_range = begin_range("bucket", self.layout, self.flat)

    def wait(self) -> None:
        """Wait until `reduced` holds the sum over ranks (see `Work.wait`). A second call returns at once.

        Raises:
            UsageError: A gradient changed while its bucket was in flight.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        end, self._end_range = self._end_range, _nothing
        end()
        if self._versions() != self._version:
            raise late_gradient(self.names)

    def _versions(self) -> int:
        """A number that grows when autograd adds to one of the views."""
        return sum([view._version for view in self.views])

    def publish(self, used_anywhere: Callable[[int], bool]) -> None:
        """Give every parameter its reduced gradient.

        Args:
            used_anywhere: Returns whether a parameter (by index) has a gradient on any rank; called only for parameters
                without a gradient on this rank. A parameter that no rank used keeps `grad=None`.
        """
        for slot, parameter, shown in zip(self.layout.slots, self.parameters, self.shown, strict=True):
            if parameter.grad is None and used_anywhere(slot.parameter):
                parameter.grad = shown

    def unpack(self, own_factor: float | Tensor | None = 1.0) -> None:
        """Copy the mean from `reduced` to `mean`, and give gradients with a graph their derivative.

        Gradients that a placeholder hides can't be differentiated again.

        Args:
            own_factor: The factor by which this rank's gradients become their mean; None: `p.grad` doesn't hold all of
                this rank's gradients.
        """
        if self.mean is not self.reduced:
            self.mean.copy_(self.reduced)
        graphs, self._graphs = self._graphs, []
        for parameter, own in graphs if own_factor is not None and not self.hides else ():
            parameter.grad = _MeanOverRanks.apply(own, parameter.grad, own_factor)  # type: ignore[no-untyped-call]

    def take(self, reduced: Sequence[Tensor | None]) -> None:
        """Take over gradients that were reduced in another layout.

        Args:
            reduced: A gradient, or None, for each parameter of the model.
        """
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self.views, strict=True):
            grad = reduced[slot.parameter]
            if grad is not None:
                view.copy_(grad.detach())
                parameter.grad = grad if grad.requires_grad else view

    def _copy(self, into: list[Tensor], what: list[Tensor]) -> None:
        try:
            torch._foreach_copy_(into, what)
        except RuntimeError:
            for name, grad in zip(self.names, (p.grad for p in self.parameters), strict=True):
                if grad is not None and grad.layout is not torch.strided:
                    raise UsageError(
                        f"parameter {name!r} has a {str(grad.layout)[6:]} gradient, which only the weight of an "
                        f"Embedding or EmbeddingBag with sparse=True may have."
                    ) from None
            raise

    def __repr__(self) -> str:
        mib = self.flat.numel() * self.flat.element_size() / (1 << 20)
        state = "in flight" if self.work is not None else "idle"
        return f"<Bucket {self.layout.index} {state} {len(self.parameters)} parameters {mib:.1f} MiB>"


class _MeanOverRanks(torch.autograd.Function):
    """Gives the mean over ranks this rank's derivative: see [Note: gradients that can be differentiated]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor, own_factor: float | Tensor) -> Tensor:
        ctx.own_factor = own_factor
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        factor = ctx.own_factor
        return gradient * (factor.to(gradient) if isinstance(factor, Tensor) else factor), None, None


def total_of(values: Tensor) -> float:
    """The sum of all elements, on the host. It isn't finite if an element isn't, or if elements are very large."""
    return values.detach().sum(dtype=sum_dtype(values)).item()


def sum_dtype(values: Tensor) -> torch.dtype:
    """A dtype in which a sum shows whether all elements are finite: a sum in 16 bits would overflow."""
    return torch.float32 if values.dtype.itemsize < 4 else values.dtype


def late_gradient(names: Sequence[str]) -> UsageError:
    """The error for a gradient of one of these parameters that changed after its bucket was sent."""
    which = f"parameter {names[0]!r}" if len(names) == 1 else f"one of the parameters {', '.join(map(repr, names))}"
    return UsageError(
        f"{which} received another gradient in the same backward pass, after its bucket had been sent. Use "
        f"checkpoint(..., use_reentrant=False), or compute that part in a backward pass of its own."
    )


def moved_parameter(names: Sequence[str]) -> UsageError:
    """The error for parameters that were converted or moved, so that autograd has new nodes for them.

    The message names the first parameter.
    """
    return UsageError(
        f"parameter {names[0]!r} was converted or moved after the model was wrapped, perhaps there and back, or its "
        f"p.grad.data was set. Convert or move a copy (copy.deepcopy(model.module)), or wrap the model again after "
        f"converting it. To change a gradient write in place (p.grad.copy_(...))."
    )


def view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """A view with the parameter's shape, and with its strides if these leave no holes (channels_last).

    It shares the flat tensor's memory but has its own version counter, so that a change of one view can be noticed.
    """
    # `empty_like` keeps a tensor's strides only if the tensor fills its memory without holes and overlap.
    stride = torch.empty_like(parameter, device="meta").stride()
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    view.set_(flat.untyped_storage(), flat.storage_offset() + offset, parameter.shape, stride)
    return view


def views_of(flat: Tensor, layout: BucketLayout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """For each slot, a view, in the parameter's shape, of a tensor laid out like the bucket; see `view_like`."""
    return [view_like(flat, slot.offset_numel, each) for slot, each in zip(layout.slots, parameters, strict=True)]


def begin_range(what: str, layout: BucketLayout, travels: Tensor) -> Callable[[], None]:
    """Begin a profile range in which a bucket is in flight; returns the function that ends the range."""
    if not is_profiled():
        return _nothing
    details = {"Bucket": layout.index, "Bytes": travels.nbytes}
    return begin_event(f"evenstep:{what} {layout.index}", [travels], details) or _nothing


def _nothing() -> None:
    """Do nothing, because no profile runs."""
