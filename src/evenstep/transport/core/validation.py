"""Validates the arguments of collectives. Wrong arguments are refused with a reason before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_tensors import disabled_dispatch
from evenstep.ground.health import excepthook
from evenstep.transport.base import Arithmetic, Collective
from evenstep.transport.core.header import DTYPES, Fingerprint
from evenstep.transport.core.reduction import plan_arithmetic

_CARRIED = frozenset(DTYPES)
_MAX_FINGERPRINTS = 4096
_WITH_SHARES = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")  # are never in place
_Described = tuple[bytes, Arithmetic | None, float | None]  # `Collective.packed`, `arithmetic`, `divisor`
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}


def is_carried(tensor: Tensor) -> bool:
    """Whether a tensor is a dense CPU tensor of a dtype that call headers can express. Pure.

    A wrapper tensor (a DTensor, a fake tensor, the result of a functional collective) has no memory of its own: reading
    it would crash the process. On the way to Gloo torch's dispatcher handles such tensors.
    """
    has_memory = type(tensor) is Tensor or type(tensor).__torch_dispatch__ is disabled_dispatch
    return has_memory and tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in _CARRIED


def flat_view(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory, [numel], which can be viewed as bytes.

    torch calls a tensor with at most one element contiguous for any stride, but refuses to view it as bytes.
    """
    flat = tensor if tensor.dim() == 1 else tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def validate_group(what: str, group: Any) -> None:
    """Raise if an argument isn't a process group of this rank.

    Args:
        what: The function or class, for messages.
        group: The argument; None: all ranks.

    Raises:
        ConfigurationError: `group` isn't a process group.
        UsageError: `group` is the value that `torch.distributed.new_group` returns on ranks outside of the group.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
        raise UsageError(f"{what}: {rank} is not in the process group that was passed.")
    raise ConfigurationError(f"{what}={checks.shown(group)} isn't a torch.distributed.ProcessGroup.")


@dataclass(frozen=True)
class Arguments:
    """Checks for the calls of one transport.

    Attributes:
        name: The transport's name.
        rank: This rank.
        world_size: Number of ranks.
        refused: Called with the reason before an error is raised, to inform the other ranks.
        carries: Returns whether the transport can carry a tensor.
    """

    name: str
    rank: int
    world_size: int
    refused: Callable[[], Callable[[str], object] | None] = lambda: None
    carries: Callable[[Tensor], bool] = is_carried
    _described: dict[tuple[Any, ...], _Described] = field(default_factory=dict)

    def prepare(self, call: Collective) -> None:
        """Check a call, make its tensors flat, and pack its fingerprint.

        Raises:
            ConfigurationError: An argument is wrong on this rank; the other ranks have been informed.
        """
        kind = call.kind
        if kind in _ROOTS:
            self.check_rank(kind, _ROOTS[kind], call.root)
        if call.inputs is call.outputs and call.inputs is not None and kind not in _WITH_SHARES:
            compared = call.inputs
            call.flat, call.back = self.flatten(compared)
            call.out = call.flat
            if kind == "reduce" and call.root != self.rank:
                call.back = None  # the result is undefined on this rank
        else:
            compared = self._prepare_pair(call)
        if call.back is not None:
            self.check_written(kind, call.back[0])
        rest = None if call.beside is None and call.row is None else self._rest_of(call)
        key = (kind, call.op, compared.dtype, compared.shape, call.root, rest)
        call.packed, call.arithmetic, call.divisor = self._described.get(key) or self._describe(key)

    def _prepare_pair(self, call: Collective) -> Tensor:
        """Like `prepare`, for a call that isn't in place. Returns the tensor that ranks compare."""
        kind = call.kind
        inputs = None if kind == "scatter" and call.root != self.rank else self.require(kind, "tensor", call.inputs)
        outputs = None if kind == "gather" and call.root != self.rank else self.require(kind, "out", call.outputs)
        if inputs is not None and outputs is not None:
            if kind == "all_to_all":
                self.check_all_to_all(outputs, inputs, *(call.splits or (None, None)))
                if inputs is outputs:  # a part would be overwritten before it is sent
                    inputs = inputs.detach().clone()
            elif kind in ("all_gather", "gather"):
                self.check_sizes(kind, "out", outputs, "tensor", inputs)
            else:
                self.check_sizes(kind, "tensor", inputs, "out", outputs)
        if inputs is not None:
            call.flat, _ = self.flatten(inputs)
        if outputs is not None:
            call.out, call.back = self.flatten(outputs)
        if inputs is None:
            call.flat = call.out.new_empty(1).expand(self.world_size * call.out.numel())
        if outputs is None:
            call.out = call.flat
        if kind == "scatter":
            return outputs  # type: ignore[return-value]  # required above
        return call.flat[:0] if call.splits is not None else inputs  # type: ignore[return-value]  # the same

    @staticmethod
    def _rest_of(call: Collective) -> tuple[int, torch.dtype, float | None]:
        """Further compared properties: number and dtype of the numbers beside a call, and the plain divisor."""
        beside = (0, torch.float64) if call.beside is None else (call.beside.numel(), call.beside.dtype)
        return *beside, None if call.row is None else call.plain

    def _describe(self, key: tuple[Any, ...]) -> _Described:
        """Data that is the same for calls with the same compared properties, and computed once for each combination."""
        kind, op, dtype, shape, root, rest = key
        arithmetic = None
        if op is not None:
            try:
                arithmetic = plan_arithmetic(op, dtype)
            except ConfigurationError as error:
                raise self._refusal(str(error)) from None
        has_quotients = dtype.is_floating_point or dtype.is_complex
        if rest is not None and rest[-1] is not None and not (op == "sum" and has_quotients):
            raise self._refusal(
                f"{kind} on rank {self.rank}: a divisor needs a sum of real or complex floats, not {op} of "
                f"{str(dtype)[6:]}."
            )
        if len(self._described) >= _MAX_FINGERPRINTS:
            self._described.clear()
        packed = Fingerprint(kind, op, dtype, tuple(shape), root, 0, *(rest or ())).pack()
        described = self._described[key] = packed, arithmetic, self.world_size if op == "mean" else None
        return described

    def flatten(self, tensor: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Flatten a tensor: [numel], and (tensor, copy) if the result has to be copied back to it at the end."""
        if not self.carries(tensor):
            raise self._refusal(
                f"rank {self.rank}: the {self.name} transport carries dense CPU tensors, and this is a "
                f"{str(tensor.layout)[6:]} {str(tensor.dtype)[6:]} {type(tensor).__name__} on {tensor.device}. Move or "
                f"convert it, or use transport='gloo'."
            )
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor if tensor.dim() == 1 and tensor.stride(0) == 1 else flat_view(tensor), None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        return copy.view(-1), (tensor, copy)

    def check_written(self, what: str, tensor: Tensor) -> None:
        """Refuse an output whose elements share memory. torch would only notice after the collective."""
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise self._refusal(
                f"{what} on rank {self.rank}: {_shape_of(tensor)} with strides {list(tensor.stride())} has elements "
                f"that share memory, so there is no place for a result. Pass a clone of it."
            )

    def check_sizes(self, what: str, long_name: str, long: Tensor, short_name: str, short: Tensor) -> None:
        """Refuse a long tensor that doesn't consist of one part per rank, each like the short tensor."""
        if long.numel() != self.world_size * short.numel() or long.dtype is not short.dtype:
            raise self._refusal(
                f"{what} on rank {self.rank}: {long_name} is {_shape_of(long)} and {short_name} {_shape_of(short)}; "
                f"{long_name} must have {self.world_size} times the elements of {short_name}, and its dtype."
            )

    def check_parts(self, what: str, name: str, parts: Sequence[Tensor], share: Tensor | None) -> None:
        """Refuse a list that isn't one tensor per rank, of one dtype, each as long as `share`; None: of any length."""
        fits = len(parts) == self.world_size
        for each in parts:
            fits = fits and each.dtype is (parts[0] if share is None else share).dtype
            fits = fits and (share is None or each.numel() == share.numel())
        if not fits:
            need = "of one dtype" if share is None else f"each with the elements of {_shape_of(share)}, and its dtype"
            found = ", ".join(map(_shape_of, parts)) or "none"
            raise self._refusal(
                f"{what} on rank {self.rank}: {name} are {found}; pass one tensor for each of {self.world_size} ranks, "
                f"{need}."
            )

    def check_rows(self, what: str, tensor: Tensor) -> None:
        """Refuse a tensor whose rows can't be divided equally between the ranks."""
        if tensor.dim() > 0 and tensor.size(0) % self.world_size:
            raise self._refusal(
                f"{what} on rank {self.rank}: {_shape_of(tensor)} has {tensor.size(0)} rows, which are not divisible "
                f"by {self.world_size} ranks. Pass splits."
            )

    def check_pairs(self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuse different numbers of outputs and inputs."""
        if len(outputs) != len(inputs):
            raise self._refusal(
                f"{what} on rank {self.rank}: {len(outputs)} outputs for {len(inputs)} inputs; pass one output for "
                f"each input."
            )

    def check_rank(self, what: str, name: str, rank: int) -> None:
        """Refuse a number that isn't a rank."""
        if not 0 <= rank < self.world_size:
            raise self._refusal(f"{what}: {name}={rank} on rank {self.rank}; ranks are 0 to {self.world_size - 1}.")

    def require(self, what: str, name: str, tensor: Tensor | None) -> Tensor:
        """Refuse None if this rank, the root, has to pass a tensor."""
        if tensor is None:
            raise self._refusal(f"{what}: rank {self.rank} has to pass {name}.")
        return tensor

    def check_all_to_all(
        self, out: Tensor, tensor: Tensor, out_splits: Sequence[int] | None, splits: Sequence[int] | None
    ) -> None:
        """Refuse parts that are neither equal nor add up to the tensors."""
        fits = out.dtype is tensor.dtype
        if out_splits is None or splits is None:
            fits = fits and out.numel() == tensor.numel() and tensor.numel() % self.world_size == 0
            need = f"equal numbers of elements, divisible by {self.world_size}"
        else:
            fits = fits and len(splits) == len(out_splits) == self.world_size
            fits = fits and sum(splits) == tensor.numel() and sum(out_splits) == out.numel()
            fits = fits and min(*splits, *out_splits) >= 0
            need = f"the elements that out_splits={list(out_splits)} and splits={list(splits)} add up to"
        if not fits:
            raise self._refusal(
                f"all_to_all on rank {self.rank}: out is {_shape_of(out)} and tensor {_shape_of(tensor)}; they must "
                f"have the same dtype, and {need}."
            )

    def _refusal(self, reason: str) -> ConfigurationError:
        inform = self.refused()
        if inform is not None:
            inform(reason)
        return ConfigurationError(reason)


def _shape_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"


def refuse_after_end(rank: int, where: str) -> NoReturn:
    """Raise the error for a collective action after the world has ended.

    Args:
        rank: This rank.
        where: The line of the user's code at which the world ended.

    Raises:
        UsageError: Always. It is printed as one message without a traceback, although the world's excepthook is gone.
    """
    with excepthook.reporting_mistakes():
        raise UsageError(
            f"rank {rank}: the world of evenstep.init has ended, with its `with` block or by close(), at {where}. "
            f"Put everything that ranks do together (training, world.mean, a save) into that block."
        )


def forked_error(rank: int | None = None) -> UsageError:
    """The error for a collective in a forked child of a rank, where the needed threads don't run."""
    parent = "a rank" if rank is None else f"rank {rank}"
    return UsageError(f"this process was forked from {parent}; only ranks can call collectives.")
