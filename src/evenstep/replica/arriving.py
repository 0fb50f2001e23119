"""Parameters whose new values are still on their way: whoever reads one waits for it.

[Note: who waits]

    step         the gather of a bucket is begun, and its parameters become *arriving*: their class has a
                 `__torch_function__`, and in their place is a tensor of NaN
    zero_grad    and whatever else sets or drops `p.grad`, doesn't wait
    reading      torch asks the class of every tensor that a function of its Python interface is given, in lists too
                 (`F.linear`, `p.data`, `torch._foreach_copy_`). The first such call with a parameter of the bucket
                 waits for the gather, makes its parameters what they were, and goes on. Whose module is running doesn't
                 matter: a tied weight, a state dict, an average, a hook or a checkpoint wait as a layer does

So nobody has to know which module reads what. Who doesn't ask Python (a ScriptModule, an extension that is given the
parameter, functorch's wrappers) isn't seen, and gets NaN, which nobody takes for old values. So that this happens to no
model by itself, a bucket's gather is put off only

- once each of its parameters has been *seen*: in a forward pass of the wrapped model, of which the values were all
  there, a call with it was noticed. Until then parameters only *listen* in forward passes;
- while nobody else has a tensor on the bucket's memory (`p.detach()` that somebody keeps), which can't wait;
- while nothing has been compiled: compiled code reads parameters without asking.

A CUDA graph that is captured later reads addresses. Its gradients are noticed by the end of the backward pass
(`ShardedExchange.finish`), and are an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.transport.base import Work

# What of an arriving parameter may be asked without waiting for its values.
_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad
_TENSOR: Any = Tensor
_HOOKS = _TENSOR._post_accumulate_grad_hooks
_WITHOUT_VALUES = frozenset((_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__, _REQUIRES_GRAD.__get__, _HOOKS.__get__))
_under_way: set[Arrival] = set()  # keeps alive what parameters refer to by their class


class Arrival:
    """The parameters of one bucket between the beginning of a gather and the first look at one of them.

    Args:
        parameters: Of the bucket.
        homes: Where they lie, one view each.
        numbers: Their numbers in the model.
        seen: Numbers of the parameters that have been seen; grows.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], homes: Sequence[Tensor], numbers: Sequence[int], seen: set[int]
    ) -> None:
        self._parameters = parameters
        self._homes = homes
        self._numbers = numbers
        self._seen = seen
        self._lock = threading.RLock()
        self._work: Work | None = None
        self._stream: torch.cuda.Stream | None = None
        self._is_listening = False
        self._stand_ins: list[Tensor] = []
        self._class = _class_of(weakref.ref(self))

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited for the values yet."""
        return self._work is not None

    def can_begin(self, values: Tensor, num_views: int) -> bool:
        """Whether all reading will be noticed: see [Note: who waits].

        Args:
            values: [numel], the memory of the bucket's parameters.
            num_views: How many tensors on it are evenstep's, besides those of the parameters and of their homes.
        """
        if any(number not in self._seen for number in self._numbers):
            return False
        expected = num_views + len(self._parameters) + len(self._homes)
        return num_tensors_on(values) == expected and all(type(each) is nn.Parameter for each in self._parameters)

    def begin(self, work: Work) -> None:
        """From here on reading one of the parameters waits for this."""
        with self._lock:
            if not self._stand_ins:
                self._stand_ins = [*_unreadable(self._homes)]
            device = self._homes[0].device
            self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._work = work
            _under_way.add(self)
            for parameter, stand_in in zip(self._parameters, self._stand_ins, strict=True):
                parameter.__class__ = self._class
                _put(parameter, stand_in)

    def arrive(self) -> bool:
        """Wait, unless somebody has; afterwards parameters are what they were. Returns whether anybody still waited.

        Raises:
            PeerLostError: A peer died; so it will be for everybody who asks.
            CollectiveTimeoutError: A peer did not arrive. The same.
        """
        with self._lock:
            if self._work is None:
                return False
            self._work.wait()
            if self._stream is not None and torch.cuda.current_stream(self._stream.device) != self._stream:
                with torch.cuda.stream(self._stream):  # who reads on another one isn't the last who reads
                    self._work.wait()
            self._work = None
            _under_way.discard(self)
            for parameter, home in zip(self._parameters, self._homes, strict=True):
                _put(parameter, home)  # first: another thread may read what is an ordinary parameter again
                parameter.__class__ = nn.Parameter
            return True

    # ------------------------------------------------------------------ listening

    def listen(self) -> None:
        """Until `stop_listening`, note which parameters are read, of those that haven't been seen."""
        if self._work is not None:
            return
        for parameter, number in zip(self._parameters, self._numbers, strict=True):
            if number not in self._seen and type(parameter) is nn.Parameter:
                self._is_listening = True
                parameter.__class__ = self._class

    def stop_listening(self) -> None:
        """See `listen`."""
        if self._is_listening:
            self._is_listening = False
            for parameter in self._parameters:
                if type(parameter) is self._class:
                    parameter.__class__ = nn.Parameter

    def noticed(self, given: Iterable[Any]) -> None:
        """A function was given one of the parameters, or several."""
        if self.arrive():
            return
        with self._lock:
            for each in _tensors_in(given):
                if type(each) is self._class:
                    each.__class__ = nn.Parameter
                    which = next(i for i, parameter in enumerate(self._parameters) if parameter is each)
                    self._seen.add(self._numbers[which])

    def __repr__(self) -> str:
        state = "under way" if self.is_under_way else "listening" if self._is_listening else "there"
        return f"<Arrival {state}, {len(self._parameters)} parameters>"


def _put(parameter: nn.Parameter, tensor: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = tensor


def _class_of(arrival: weakref.ref[Arrival]) -> type[nn.Parameter]:
    """A class for arriving parameters of one bucket."""

    def noticed(*given: Any) -> None:
        there = arrival()
        if there is None:  # a bucket that listened and has gone
            for each in _tensors_in(given):
                if type(each) is Arriving:
                    each.__class__ = nn.Parameter  # type: ignore[assignment]
        else:
            there.noticed(given)

    class Arriving(nn.Parameter):
        """See [Note: who waits]."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in _WITHOUT_VALUES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            noticed(args, kwargs)
            return func(*args, **kwargs)

        # nn.Parameter's own look at the class before they look at the values.
        def __deepcopy__(self, memo: Any) -> Any:
            noticed(self)
            return self.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            noticed(self)
            return self.__reduce_ex__(protocol)

        def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
            noticed(self)
            return repr(self)

    Arriving.__name__ = Arriving.__qualname__ = "Parameter"
    return Arriving


def _tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _tensors_in(each)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors_in(each)


@cache
def _own_count() -> int:
    """What asking adds to the number of owners of a memory."""
    alone = torch.zeros(1, device="cpu")
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata)) - 1


def num_tensors_on(tensor: Tensor) -> int:
    """How many tensors there are on a tensor's memory, itself counted."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - _own_count()


def _unreadable(homes: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of the same shape, of one NaN each: they take no memory."""
    for home in homes:
        yield torch.full((), float("nan"), dtype=home.dtype, device=home.device).expand(home.shape)
