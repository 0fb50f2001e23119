"""Private parts of torch's DistributedDataParallel and of FSDP2's `fully_shard` (torch 2.11 and later)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from evenstep.ground.compat.private_names import SEEN, PrivateName
from evenstep.ground.compat.torch_tensors import root_mesh

Future = torch._C.Future

_FSDP = "torch.distributed.fsdp"  # importing it takes seconds; if it isn't imported, no module is sharded

__all__ = [
    "Future",
    "JoinConfig",
    "ShardedParts",
    "active_in_dynamo",
    "is_sharded_module",
    "is_slice",
    "localise_parameters",
    "reshard",
]


@contextlib.contextmanager
def active_in_dynamo(model: DistributedDataParallel) -> Iterator[None]:
    """Context in which torch.compile knows the running module, so that it splits the module's graph at buckets."""
    running = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = model
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = running


def is_slice(mesh: DeviceMesh) -> bool:
    """Whether a mesh is a slice of a larger mesh."""
    return bool(root_mesh(mesh) != mesh)


def localise_parameters(module: nn.Module) -> None:
    """Replace parameters that tensor parallelism has divided (`DTensor`) by their local parts."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)


def is_sharded_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module itself."""
    return _FSDP in sys.modules and isinstance(module, sys.modules[_FSDP].FSDPModule)


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, as after an evaluation; the sharded parameters remain."""
    if _FSDP in sys.modules:
        for each in module.modules():
            if is_sharded_module(each):
                each.reshard()  # type: ignore[operator]


class ShardedParts:
    """The parts of a module that `fully_shard` has divided, in groups of parameters. Each group is sent as one message.

    Args:
        module: The whole model; from now on torch sums the gradients of its sharded parts over ranks (`divide_by`).

    Attributes:
        groups: torch's parameter groups, by `id`.
        modules: All sharded modules.
        roots: The outermost sharded modules.
        divisor: The number by which torch divides sums.
        synchronises: Whether the next backward pass adds gradients over ranks.
        states: torch's states of the sharded modules.
        then: Called when a backward pass has ended for all sharded modules; None: nothing is called.
        used: The sharded parameters, by `id`, that have had a gradient on this rank since `used` was last emptied.
    """

    def __init__(self, module: nn.Module) -> None:
        sharded: list[Any] = [each for each in module.modules() if is_sharded_module(each)]
        self.used: set[int] = set()
        self.groups: dict[int, Any] = {}
        self.states: list[Any] = [each._get_fsdp_state() for each in sharded]
        for each, state in zip(sharded, self.states, strict=True):
            each.set_force_sum_reduction_for_comms(True)
            found = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if found is None else found:
                if group is not None:
                    self.groups[id(group)] = group
        inner = {id(part) for each in sharded for part in each.modules() if part is not each}
        self.roots = [each for each in sharded if id(each) not in inner]
        self.synchronises = True
        self.modules, self.divisor = sharded, 0.0
        self.divide_by(1.0)
        for group in self.groups.values():
            self._watch(group)
        self.then: Callable[[], None] | None = None
        for state in {id(each): each for each in self.states}.values():
            self._follow(state)

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, which optimizers step. Not available during a pass: modules have gathered them then.

        They are read from the modules, because torch's own list has a replaced parameter (as by `to_empty`) only after
        the next pass.
        """
        for root in self.roots:
            reshard(root)
        places = [each._module_info for group in self.groups.values() for each in group.fsdp_params]
        return [getattr(place.module, place.param_name) for place in places]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the gradients that autograd computes."""
        members = [(group, each) for group in self.groups.values() for each in group.fsdp_params]
        policies = [(getattr(each, "mp_policy", None) or group.mp_policy, each) for group, each in members]
        return {policy.param_dtype or each.sharded_param.dtype for policy, each in policies}

    def synchronise(self, *, is_on: bool) -> None:
        """Set whether the next backward passes add gradients over ranks, or keep them whole on each rank."""
        if is_on is not self.synchronises:
            self.synchronises = is_on
            for root in self.roots:
                root.set_requires_gradient_sync(is_on)

    def divide_by(self, divisor: float) -> None:
        """Make torch divide the sums of later passes."""
        if divisor != self.divisor:
            self.divisor = divisor
            for each in self.modules:
                each.set_gradient_divide_factor(float(divisor))

    def rescale(self, by: float) -> None:
        """Multiply the gradients that earlier passes have kept whole on this rank.

        In torch 2.15 two attributes may be one tensor; in earlier versions a parameter may have two tensors.
        """
        for group in self.groups.values():
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                grads = {id(grad): grad for grad in (each.unsharded_accumulated_grad, getattr(whole, "grad", None))}
                for grad in grads.values():
                    if grad is not None:
                        grad.mul_(by)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Called at the end of autograd's pass: call `then` when torch has ended the pass, too, perhaps at once.

        `then` can't be added to autograd's callbacks from inside a callback: their list may be reallocated while one
        runs.
        """
        if self._is_ending():
            self.then = then
        else:
            then()

    def _is_ending(self) -> bool:
        return any(state._state_ctx.post_backward_final_callback_queued for state in self.states)

    def _follow(self, state: Any) -> None:
        plain = type(state)._root_post_backward_final_callback.__get__(state)  # without another wrapper's replacement

        def ended() -> None:
            plain()
            if self.then is not None and not self._is_ending():
                then, self.then = self.then, None
                then()

        state._root_post_backward_final_callback = ended

    def _watch(self, group: Any) -> None:
        """Record which parameters of a group have a gradient, and give the others zeros.

        Otherwise a rank that doesn't use a parameter would send a shorter message than the ranks that use it expect.
        """
        plain = type(group).post_backward.__get__(group)  # without another wrapper's replacement

        def post_backward(*unused: Any) -> Any:
            if group.reduce_grads:
                for each in group.fsdp_params:
                    if not hasattr(each, "_unsharded_param"):
                        continue  # the module hasn't run yet
                    whole = each.unsharded_param
                    if whole.grad is not None or each.unsharded_accumulated_grad is not None:
                        self.used.add(id(each.sharded_param))
                    elif whole.requires_grad:
                        # torch 2.15 gives it gradients of the reduce dtype, and refuses those of another one.
                        whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
            return plain(*unused)

        group.post_backward = post_backward


# What isn't looked for when evenstep is imported.
_DDP = "torch.nn.parallel"
_FSDP = "torch.distributed.fsdp._fully_shard"
_NO_FSDP = "evenstep.attach and parallelize can't take what fully_shard has divided"
_NEW = ("2.13", "2.14", "2.15")
NAMES = (
    PrivateName(
        f"{_DDP}:DistributedDataParallel._active_ddp_module",
        "the module that runs, for torch.compile",
        "graphs aren't split at buckets, so nothing overlaps",
    ),
    PrivateName(
        "torch.distributed.tensor.parallel.ddp:_pre_dp_module_transform",
        "local parts of DTensor parameters",
        "an ImportError with device_mesh and tensor parallelism",
    ),
    *(
        PrivateName(where, what, _NO_FSDP)
        for where, what in (
            ("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "what fully_shard has made of a module"),
            (f"{_FSDP}._fsdp_state:FSDPState.__init__~_state_ctx", "the state that all sharded parts of a model share"),
            (f"{_FSDP}._fsdp_state:FSDPState._root_post_backward_final_callback", "ends their backward pass"),
            (f"{_FSDP}._fsdp_param:FSDPParam.__init__~_module_info", "which module has a parameter"),
            (f"{_FSDP}._fsdp_param_group:FSDPParamGroup.post_backward", "adds their gradients over ranks"),
            (f"{_FSDP}._fsdp_param:FSDPParam.init_unsharded_param~_unsharded_param", "a parameter while it is whole"),
        )
    ),
    *(
        # Until 2.14 it is an attribute that the constructor sets, later a property.
        PrivateName(
            f"{_FSDP}._fsdp_param:FSDPParam.{where}", "the gradient of a parameter while it is whole", _NO_FSDP, seen
        )
        for where, seen in (
            ("__init__~unsharded_accumulated_grad", SEEN[:-1]),
            ("unsharded_accumulated_grad", SEEN[-1:]),
        )
    ),
    *(
        # Until 2.12 it is an attribute of objects, which can't be looked up in the class.
        PrivateName(f"{_FSDP}._fsdp_state:FSDPState.{where}", "parameters that travel as one", _NO_FSDP, _NEW)
        for where in ("_fsdp_param_group", "__init__~_fsdp_param_groups")
    ),
)
