"""Autograd hooks, which report when a backward pass reaches the outputs, and when a bucket has all its gradients.

[Note: hooks on outputs]

torch's `Tensor.register_hook` makes a new ordered dict of hooks and a new handle for each tensor. Together they take 10
microseconds, and these hooks are never removed. But a node of the graph accepts the hook dict of another tensor, if
both tensors have the same index among the outputs of their nodes. So one tensor holds the hook dict for all outputs,
and the outputs themselves are not changed.

[Note: counting and watching]

A hook on every parameter costs a Python call per parameter and backward pass: a tenth of the step of a model with 400
small tensors. So gradients are *counted*, with a hook on every parameter, only in the first synchronised pass. From
then on each bucket is *watched* through its sentinel, the parameter whose gradient came last. When the sentinel's
gradient comes, the bucket's other gradients are checked: a gradient has come if it is new, or if its version has
changed since the pass began. Parameters without their gradient get a hook for the rest of this pass, and the last of
them becomes the sentinel.

When a pass arrives at the module's outputs, autograd knows which parameters it will not reach, and buckets don't wait
for these. Autograd is queried only about sentinels and about parameters that were unused before. It doesn't know which
parameters a reentrant checkpoint will reach in its own, nested backward pass, so such parameters are always expected.
In a model with such parameters those that were unused before are expected, too: a checkpoint may reach them next. When
a frozen parameter is trained again, gradients are counted once more.

Autograd has a thread for each GPU, so two threads call the hooks of a model on two GPUs. A hook holds a lock until the
buckets that it completes are launched.

A parameter that receives several gradients in one pass (reentrant checkpoints) makes its bucket *patient*: the bucket
is complete only when the pass has ended. An unexpected late gradient changes the version of the bucket's memory; the
bucket compares versions when the sum arrives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstep.ground.compat.torch_autograd import graph_task_id, will_execute
from evenstep.ground.computing.pytrees import tensors_in
from evenstep.replica.gradients.buckets.layout import Layout


class Listener(Protocol):
    """Receives the events of `Readiness`."""

    def gradient_came(self, parameter: int) -> bool:
        """Called when a watched parameter has its gradient. Returns whether this pass fills buckets."""

    def bucket_complete(self, bucket: int) -> None:
        """Called when a bucket has all the gradients that it can get in this pass."""

    def gradient_late(self, parameter: int) -> None:
        """Called when a parameter has received another gradient after its bucket was complete."""


_hooking: weakref.WeakValueDictionary[int, Readiness] = weakref.WeakValueDictionary()  # by `id` of the parameter


class Readiness:
    """Follows one backward pass after another, and reports complete buckets.

    Args:
        parameters: The parameters in registration order.
        layout: The parameters' places in buckets.
        listener: Receives the events as long as it lives.

    Attributes:
        lock: Held while an event is handled.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, listener: Listener) -> None:
        self.lock = threading.RLock()
        self._parameters = parameters
        self._nodes = [_accumulator(parameter) for parameter in parameters]
        self._listener = weakref.ref(listener)
        self._handles: dict[int, RemovableHandle] = {}  # permanent hooks, by parameter
        self._temporary: dict[int, RemovableHandle] = {}  # hooks for this pass only, by parameter
        self._unhooked: set[int] = set()  # frozen parameters, which get hooks when they are trained again
        weakref.finalize(self, _remove_all, self._handles, self._temporary)
        self._nested: set[int] = set()  # parameters whose gradients come from a backward pass within the pass
        self._graph_task: int | None = None
        self._no_gradients: list[tuple[Tensor, int] | None] = [None] * len(parameters)
        self.is_counting = False
        self.order: list[int] = []  # while counting: parameters in the order in which their gradients came
        self._num_gradients = [0] * len(parameters)
        self._retire_others()
        self._follow(layout)
        self.count()
        self._clear_pass()

    def _retire_others(self) -> None:
        """Remove the hooks of an abandoned wrapper around the same parameters.

        The garbage collector may have freed the wrapper on some ranks only.
        """
        for parameter in self._parameters:
            other = _hooking.get(id(parameter))
            if other is not None and any(each is parameter for each in other._parameters):
                _remove_all(other._handles, other._temporary)
            _hooking[id(parameter)] = self

    def watch(self, layout: Layout) -> None:
        """Watch the buckets of a layout through their sentinels, from the next pass on.

        A rank that has had only empty shares continues to count: no gradient has come yet.
        """
        self._follow(layout)
        self._clear_pass()
        if not self.order:
            return
        turn = {parameter: index for index, parameter in enumerate(self.order)}
        for number, bucket in enumerate(self._buckets):
            if all(self._num_gradients[parameter] <= 1 for parameter in bucket):  # else complete at the pass's end
                used = [parameter for parameter in bucket if parameter in turn]
                self._sentinels[number] = max(used, key=turn.__getitem__) if used else bucket[-1]
        self._unused_before = {p for p in range(len(self._parameters)) if p not in turn}
        self._frozen = [p for p in self._unused_before if not self._parameters[p].requires_grad]
        self.is_counting = False
        self._set_hooks(sentinel for sentinel in self._sentinels if sentinel is not None)

    def count(self) -> None:
        """Count gradients in the next pass: it is the first, or may reach no output at which to query autograd."""
        if self._buckets and not self.is_counting:  # without buckets there is nothing to watch
            self.is_counting, self.order = True, []
            self._num_gradients = [0] * len(self._parameters)
            self._set_hooks(range(len(self._parameters)))

    # ------------------------------------------------------------------ a pass

    def begin(self) -> None:
        """Called when a pass begins: record which gradients exist, and their versions."""
        if self._frozen and any(self._parameters[parameter].requires_grad for parameter in self._frozen):
            self.count()
        if self._unhooked:
            self._set_hooks(self._unhooked | self._handles.keys())
        # A hook that the script has registered later may change the gradient. Move our hook after it, so that the
        # changed gradient is sent, as with torch's class.
        for parameter, handle in self._handles.items():
            hooks = self._parameters[parameter]._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # not `move_to_end`, which autograd ignores
        grads = [parameter.grad for parameter in self._parameters]
        if [True for grad in grads if grad is not None]:
            self._before = [None if grad is None else (grad, grad._version) for grad in grads]
        else:  # None, as zero_grad usually sets it
            self._before = self._no_gradients

    def outputs_reached(self) -> None:
        """Find the parameters that autograd will not reach; called inside the pass, before any gradient."""
        if self.is_counting:
            self._graph_task = graph_task_id()
            return
        try:
            self._absent = {p for p in self._unused_before if not self._will_come(p)}
            lost = [
                b for b, sentinel in enumerate(self._sentinels) if not (sentinel is None or self._will_come(sentinel))
            ]
            self._absent.update(p for b in lost for p in self._buckets[b] if not self._will_come(p))
        except RuntimeError:
            return  # torch.autograd.grad with respect to a parameter: no gradient is accumulated
        for bucket in lost:
            # If the module was called several times, this runs several times.
            if not self._await(bucket) and bucket not in self._completed and bucket not in self._vacant:
                self._vacant.append(bucket)  # complete, once the pass is known to accumulate gradients

    def is_another(self, parameter: int) -> bool:
        """Whether a parameter was converted or moved.

        Autograd then has a new node for the parameter, even if it was moved back.
        """
        return _accumulator(self._parameters[parameter]) is not self._nodes[parameter]

    def any_has_come(self) -> bool:
        """Whether any parameter has received a gradient in this pass; checks all parameters."""
        everything = range(len(self._parameters))
        return len(self._missing(everything)) < len(everything)

    def _missing(self, among: Iterable[int]) -> set[int]:
        """Parameters that have received no gradient in this pass.

        Written without a call per parameter: such calls make counting expensive.
        """
        parameters, before_all, missing = self._parameters, self._before, set()
        if before_all is self._no_gradients:
            return {parameter for parameter in among if parameters[parameter].grad is None}
        for parameter in among:
            grad, before = parameters[parameter].grad, before_all[parameter]
            if grad is None or (before is not None and grad is before[0] and grad._version == before[1]):
                missing.add(parameter)
        return missing

    def end(self) -> None:
        """Called when the pass has ended: adapt to gradients that came in another order or number than expected."""
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
        if listener is None or not listener.gradient_came(parameter):
            return
        if self.is_counting:
            if graph_task_id() != self._graph_task:
                self._nested.add(parameter)
            self._num_gradients[parameter] += 1
            if self._num_gradients[parameter] == 1:
                self.order.append(parameter)
            return
        while self._vacant:
            self._complete(self._vacant.pop(0), listener)
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
            return  # a second gradient of a parameter while other parameters' gradients are missing
        self._complete(bucket, listener)

    def _complete(self, bucket: int, listener: Listener) -> None:
        self._completed.add(bucket)
        listener.bucket_complete(bucket)

    def _await(self, bucket: int, but: int = -1) -> bool:
        """Hook the parameters for which a bucket still waits. Returns whether there are any."""
        missing = self._missing(self._buckets[bucket]) - self._absent - {but}
        pending = {p for p in missing if self._parameters[p].requires_grad}
        if pending:
            self._awaited[bucket] = pending
            for parameter in pending - self._handles.keys() - self._temporary.keys():  # a second output gets here, too
                self._temporary[parameter] = self._hook(parameter)
        return bool(pending)

    def _will_come(self, parameter: int) -> bool:
        may_be_nested = parameter in self._nested or (self._nested and parameter in self._unused_before)
        return bool(may_be_nested or will_execute(self._nodes[parameter]))

    # ------------------------------------------------------------------ hooks

    def _follow(self, layout: Layout) -> None:
        self._buckets = [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets]
        self._bucket_of = layout.bucket_of
        self._sentinels: list[int | None] = [None] * len(self._buckets)  # None: patient
        self._unused_before = set()
        self._frozen = []  # frozen while gradients were counted

    def _clear_pass(self) -> None:
        for handle in self._temporary.values():
            handle.remove()
        self._temporary.clear()
        self._before = self._no_gradients
        self._absent = set()  # parameters that autograd will not reach in this pass
        self._vacant: list[int] = []  # buckets that get no gradient in this pass
        self._completed: set[int] = set()  # buckets, in this pass
        self._awaited: dict[int, set[int]] = {}  # parameters whose gradients are still missing, by bucket
        self._last_to_come: dict[int, int] = {}  # the last parameter of each awaited bucket

    def _set_hooks(self, wanted: Iterable[int]) -> None:
        keep = set(wanted)
        self._unhooked = {parameter for parameter in keep if not self._parameters[parameter].requires_grad}
        keep -= self._unhooked
        for parameter in self._handles.keys() - keep:
            self._handles.pop(parameter).remove()
        for parameter in keep - self._handles.keys():
            self._handles[parameter] = self._hook(parameter)

    def _hook(self, index: int) -> RemovableHandle:
        # The hook refers to this object weakly: else a module that is wrapped again would be averaged twice.
        this = weakref.ref(self)

        def gradient_accumulated(_: Tensor) -> None:
            readiness = this()
            if readiness is not None:
                with readiness.lock:
                    readiness._gradient_came(index)

        handle: RemovableHandle = self._parameters[index].register_post_accumulate_grad_hook(gradient_accumulated)  # type: ignore[no-untyped-call]
        return handle


def _accumulator(parameter: Tensor) -> Any:
    """The autograd node that accumulates into `parameter.grad`; it lives only as long as it is referenced."""
    is_frozen = not parameter.requires_grad
    if is_frozen:  # a frozen parameter has no node; if trained again it gets this one, which the caller keeps alive
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


Hook = Callable[[Tensor], Tensor | None]


class _Mark:
    """A marker in the graph of the outputs, which lives as long as the graph."""


class OutputHooks:
    """Hooks one function on a module's outputs in every forward pass: see [Note: hooks on outputs].

    Args:
        function: A method, called with the gradient that reaches an output; may return another gradient to replace it.
        is_tracked: Whether `are_alone_in` will be called.
    """

    def __init__(self, function: Hook, *, is_tracked: bool = False) -> None:
        self._marks: weakref.WeakSet[_Mark] | None = weakref.WeakSet() if is_tracked else None
        method = weakref.WeakMethod(function)  # graphs live as long as their outputs, and mustn't keep the model alive

        def reached(grad: Tensor) -> Tensor | None:
            called = method()
            return None if called is None else called(grad)

        self._function: Hook = reached
        # With this mark torch saves outputs that carry the hook without a warning.
        setattr(self._function, "__torch_unserializable__", True)  # noqa: B010
        self._hook_holder = torch.empty(0, device="cpu")
        self._hook_holder._backward_hooks = {0: self._function}

    def put_on(self, outputs: Any) -> bool:
        """Hook the outputs: the function is called once for each tensor in them that a backward pass reaches.

        Returns:
            Whether a backward pass can reach any of the tensors.
        """
        mark = None
        if self._marks is not None:
            self._marks.add(mark := _Mark())
        if isinstance(outputs, Tensor):
            return self._put_on_one(outputs, mark)
        found = [self._put_on_one(each, mark) for each in tensors_in(outputs)]
        return True in found

    def are_alone_in(self, loss: Tensor, *, other: OutputHooks) -> bool:
        """Whether a loss goes through outputs with these hooks, and through none with the other hooks.

        Args:
            loss: A loss with a graph, which is searched only while outputs with these hooks have a graph.
            other: The other hooks. The graph beneath outputs with these hooks isn't searched.
        """
        if not self._marks:
            return False
        found, seen, pending = False, set(), [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            marks = cast(dict[Any, Any], node.metadata)
            if other in marks:
                return False
            if self in marks:
                found = True
            else:
                pending += [before for before, _ in node.next_functions]
        return found

    def _put_on_one(self, output: Tensor, mark: _Mark | None) -> bool:
        if (node := output.grad_fn) is None:
            return False
        cast(dict[Any, Any], node.metadata)[self] = mark
        if output.output_nr == 0:
            node._register_hook_dict(self._hook_holder)
        else:
            output.register_hook(self._function)  # type: ignore[no-untyped-call]
        return True
