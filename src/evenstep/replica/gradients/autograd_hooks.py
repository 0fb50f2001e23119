"""When are a bucket's gradients there? Told by autograd, with as few calls into Python as will do.

[Note: counting and watching]

A hook on every parameter costs a Python call per parameter and backward pass: on a model of 400 small tensors a tenth
of the step. So parameters are *counted* only in the first synchronised pass. Then each bucket is *watched* through its
sentinel, the parameter whose gradient came last. When a sentinel's gradient comes, the others are looked at (a
gradient that is new, or whose version has changed since the pass began, has come): verified, not counted. Those that
are missing get a hook for the rest of this pass, and the last of them to come is the sentinel from then on.

What autograd will not reach is known when a pass arrives at the module's outputs, and is asked only about sentinels
and about parameters that were unused before: a bucket doesn't wait for them. Autograd doesn't know of what a
reentrant checkpoint will compute in a backward pass within the backward pass, so those parameters always are expected.

A parameter that receives several gradients in one pass (reentrant checkpoints) makes its bucket *patient*: it is
complete only when the pass has ended. A late gradient that nobody expected changes the version of the bucket's memory,
which the engine compares when the sum arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.replica.layout import Layout


class Listener(Protocol):
    """What `Readiness` tells."""

    def gradient_came(self) -> bool:
        """A watched parameter has its gradient. Returns whether this pass fills buckets."""

    def bucket_complete(self, bucket: int) -> None:
        """All gradients that a bucket can get in this pass are there."""

    def gradient_late(self, parameter: int) -> None:
        """A parameter has received another gradient after its bucket was complete."""


class Readiness:
    """Follows one backward pass after another and says which buckets are complete.

    Args:
        parameters: In registration order.
        layout: Which of them lies in which bucket.
        listener: Is told, for as long as it lives.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, listener: Listener) -> None:
        self._parameters = parameters
        self._nodes = [_accumulator(parameter) for parameter in parameters]
        self._listener = weakref.ref(listener)
        self._handles: dict[int, RemovableHandle] = {}  # by parameter: hooks that stay
        self._temporary: dict[int, RemovableHandle] = {}  # by parameter: hooks of this pass
        self._unhooked: set[int] = set()  # frozen parameters that are to be hooked when they are trained again
        weakref.finalize(self, _remove_all, self._handles, self._temporary)
        self._sentinels: list[int | None] = []  # by bucket; None: patient
        self._unused_before: set[int] = set()
        self._nested: set[int] = set()  # parameters whose gradients come from a backward pass within the pass
        self._graph_task: int | None = None
        self._vacant: list[int] = []  # buckets that get no gradient in this pass
        self._no_gradients: list[tuple[Tensor, int] | None] = [None] * len(parameters)
        self._before = self._no_gradients
        self._absent: set[int] = set()  # parameters that autograd will not reach in this pass
        self._completed: set[int] = set()  # buckets, in this pass
        self._awaited: dict[int, set[int]] = {}  # by bucket: parameters that are still to come
        self._last_to_come: dict[int, int] = {}  # by bucket that was awaited
        self.is_counting = bool(layout.buckets)  # where nothing travels there is nothing to watch
        self.order: list[int] = []  # while counting: parameters in the order in which their gradients came
        self._num_gradients = [0] * len(parameters)
        self._set_hooks(range(len(parameters)) if self.is_counting else ())
        self._follow(layout)
        self._clear_pass()

    @property
    def num_hooks(self) -> int:
        """How many parameters call into Python in a backward pass that goes as expected."""
        return len(self._handles)

    def watch(self, layout: Layout) -> None:
        """From the next pass on watch the buckets of a layout through their sentinels.

        A rank whose passes so far were over empty shares goes on counting: it has seen no gradient come.
        """
        self._follow(layout)
        if not self.order:
            self._clear_pass()
            return
        turn = {parameter: index for index, parameter in enumerate(self.order)}
        self._sentinels = []
        for bucket in self._buckets:
            if any(self._num_gradients[parameter] > 1 for parameter in bucket):
                self._sentinels.append(None)  # patient: complete at the end of the pass
            else:
                used = [parameter for parameter in bucket if parameter in turn]
                self._sentinels.append(max(used, key=turn.__getitem__) if used else bucket[-1])
        self._unused_before = {p for p in range(len(self._parameters)) if p not in turn}
        self.is_counting = False
        self._set_hooks(sentinel for sentinel in self._sentinels if sentinel is not None)
        self._clear_pass()

    # ------------------------------------------------------------------ a pass

    def begin(self) -> None:
        """A pass begins: remember which gradients there are, and in which version."""
        if self._unhooked:
            self._set_hooks(self._unhooked | self._handles.keys())
        # A script's hook that came after ours may change the gradient: as under torch's class that happens before it
        # is sent.
        for parameter, handle in self._handles.items():
            hooks = self._parameters[parameter]._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # not `move_to_end`, of which autograd takes no notice
        grads = [parameter.grad for parameter in self._parameters]
        if [True for grad in grads if grad is not None]:
            self._before = [None if grad is None else (grad, grad._version) for grad in grads]
        else:  # as zero_grad usually leaves it
            self._before = self._no_gradients

    def outputs_reached(self) -> None:
        """Inside the pass, before any gradient: ask autograd what it will not reach."""
        if self.is_counting:
            self._graph_task = torch._C._current_graph_task_id()
            return
        try:
            self._absent = {p for p in self._unused_before if not self._will_come(p)}
            lost = [
                b for b, sentinel in enumerate(self._sentinels) if not (sentinel is None or self._will_come(sentinel))
            ]
        except RuntimeError:
            return  # torch.autograd.grad with respect to a parameter: no gradient is accumulated
        for bucket in lost:
            self._absent.update(p for p in self._buckets[bucket] if not self._will_come(p))
            if not self._await(bucket):
                self._vacant.append(bucket)  # complete, once the pass is known to be a real one

    def is_another(self, parameter: int) -> bool:
        """Whether a parameter was converted or moved: autograd has another node for it then, also when it is back."""
        return _accumulator(self._parameters[parameter]) is not self._nodes[parameter]

    def any_has_come(self) -> bool:
        """Whether any parameter has received a gradient in this pass; looks at all of them."""
        everything = range(len(self._parameters))
        return len(self._missing(everything)) < len(everything)

    def drop_what_came(self) -> None:
        """Forget the gradients of this pass."""
        everything = range(len(self._parameters))
        for index in set(everything) - self._missing(everything):
            self._parameters[index].grad = None

    def _missing(self, among: Iterable[int]) -> set[int]:
        """Parameters that have received no gradient in this pass. A call for each would be the cost to avoid."""
        parameters, before_all, missing = self._parameters, self._before, set()
        if before_all is self._no_gradients:
            return {parameter for parameter in among if parameters[parameter].grad is None}
        for parameter in among:
            grad, before = parameters[parameter].grad, before_all[parameter]
            if grad is None or (before is not None and grad is before[0] and grad._version == before[1]):
                missing.add(parameter)
        return missing

    def end(self) -> None:
        """The pass has ended: learn from what went otherwise than expected."""
        if self._awaited and not self.is_counting:
            for bucket, pending in self._awaited.items():
                self._unused_before |= pending
                last = self._last_to_come.get(bucket)
                if last is not None and not pending:
                    self._sentinels[bucket] = last
            self._set_hooks(sentinel for sentinel in self._sentinels if sentinel is not None)
        self._clear_pass()

    # ------------------------------------------------------------------ called by autograd

    def _gradient_came(self, parameter: int) -> None:
        listener = self._listener()
        if listener is None or not listener.gradient_came():
            return
        if self.is_counting:
            if torch._C._current_graph_task_id() != self._graph_task:
                self._nested.add(parameter)
            self._num_gradients[parameter] += 1
            if self._num_gradients[parameter] == 1:
                self.order.append(parameter)
            return
        while self._vacant:
            self._complete(self._vacant.pop(0))
        bucket = self._bucket_of[parameter]
        if bucket in self._completed:
            listener.gradient_late(parameter)
            return
        pending = self._awaited.get(bucket)
        if pending is None:
            if self._await(bucket, but=parameter):
                return
        elif parameter in pending:
            pending.discard(parameter)
            self._last_to_come[bucket] = parameter
            if pending:
                return
        else:
            return  # a second gradient of a parameter while others are still to come
        self._complete(bucket)

    def _complete(self, bucket: int) -> None:
        self._completed.add(bucket)
        listener = self._listener()
        if listener is not None:
            listener.bucket_complete(bucket)

    def _await(self, bucket: int, but: int = -1) -> bool:
        """Hook what a bucket still waits for. Returns whether there is anything."""
        missing = self._missing(self._buckets[bucket]) - self._absent - {but}
        pending = {p for p in missing if self._parameters[p].requires_grad}
        if pending:
            self._awaited[bucket] = pending
            for parameter in pending - self._handles.keys():
                self._temporary[parameter] = self._hook(parameter)
        return bool(pending)

    def _will_come(self, parameter: int) -> bool:
        return parameter in self._nested or bool(torch._C._will_engine_execute_node(self._nodes[parameter]))

    # ------------------------------------------------------------------ hooks

    def _follow(self, layout: Layout) -> None:
        self._buckets = [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets]
        self._bucket_of = layout.bucket_of
        self._sentinels = [None] * len(self._buckets)
        self._unused_before = set()

    def _clear_pass(self) -> None:
        for handle in self._temporary.values():
            handle.remove()
        self._temporary.clear()
        self._before = self._no_gradients
        self._absent = set()
        self._vacant = []
        self._completed = set()
        self._awaited = {}
        self._last_to_come = {}

    def _set_hooks(self, wanted: Iterable[int]) -> None:
        keep = set(wanted)
        self._unhooked = {parameter for parameter in keep if not self._parameters[parameter].requires_grad}
        keep -= self._unhooked
        for parameter in self._handles.keys() - keep:
            self._handles.pop(parameter).remove()
        for parameter in keep - self._handles.keys():
            self._handles[parameter] = self._hook(parameter)

    def _hook(self, index: int) -> RemovableHandle:
        # The hook knows this object weakly: a module that is wrapped again is not averaged twice.
        this = weakref.ref(self)

        def gradient_accumulated(_: Tensor) -> None:
            readiness = this()
            if readiness is not None:
                readiness._gradient_came(index)

        handle: RemovableHandle = self._parameters[index].register_post_accumulate_grad_hook(gradient_accumulated)  # type: ignore[no-untyped-call]
        return handle


def _accumulator(parameter: Tensor) -> Any:
    """The node of autograd that accumulates into `parameter.grad`. It lives only as long as somebody holds it."""
    is_frozen = not parameter.requires_grad
    if is_frozen:  # it has none meanwhile; when it is trained again, it has this one, which is held
        parameter.requires_grad_()
    try:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn
    finally:
        if is_frozen:
            parameter.requires_grad_(False)
    assert node is not None
    return node.next_functions[0][0]


def _remove_all(*handles: dict[int, RemovableHandle]) -> None:
    for by_parameter in handles:
        for handle in by_parameter.values():
            handle.remove()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call back when the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
