"""Makes the backend's collectives visible in torch's own tools: as events of a profile, and to `CommDebugMode`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from evenstep.ground.compat.torch_profiler import begin_event, count_call, is_watched
from evenstep.transport.backend.work import GroupWork

_Method = TypeVar("_Method", bound=Callable[..., Any])


def observed(collective: str, operation: str) -> Callable[[_Method], _Method]:
    """Make a method of a process group visible to torch's profiler and `CommDebugMode`.

    The event of a call is named "evenstep:<collective>", and lasts from the launch until the call is known to be done.
    The event's fields have the names that torch's own groups use.

    Args:
        collective: The collective's name in `torch.distributed`, such as "all_reduce".
        operation: The collective's name in `torch.ops.c10d`, such as "allreduce_".
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_watched():
                return method(self, *args, **kwargs)
            tensors = list(tensors_in(args))
            count_call(operation, tensors)
            end = begin_event(
                f"evenstep:{collective}",
                tensors,
                {
                    "Collective name": collective,
                    "Bytes": sum(each.nbytes for each in tensors),
                    "Process Group Name": self.getGroupName(),
                    "Group size": self.size(),
                    "Rank": self.rank(),
                    "Seq": self.num_calls,
                },
            )
            if end is None:
                return method(self, *args, **kwargs)
            try:
                work = method(self, *args, **kwargs)
            except BaseException:
                end()
                raise
            if isinstance(work, GroupWork):
                work.call_at_end(end)
            else:  # a work of Gloo or NCCL, which records its own event
                end()
            return work

        return call  # type: ignore[return-value]

    return decorate


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among some values, and in their lists of lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
