"""Checks torch's constructor arguments, and translates them to the engine's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_ddp import is_slice, localise_parameters
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.health.users_code import warn
from evenstep.replica.gradients.buckets.layout import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, BucketPolicy
from evenstep.replica.module_buffers import Rule, rule_of, validate_rules
from evenstep.replica.monitors.checks import Policy, validate_policy
from evenstep.transport.core.validation import validate_group
from evenstep.world import World

_MIB = 1 << 20
_LARGEST_MIB = 1 << 40


@dataclass(frozen=True)
class Settings:
    """The settings of a wrapped module.

    Attributes:
        policy: Sizes and dtype of buckets.
        ignored: Names of parameters and module buffers that every rank keeps for itself.
        sparse: Names of parameters whose gradients are sparse.
        inputs_to: The device to which inputs are moved before the forward pass; None: they aren't moved.
        dim: The batch dimension of inputs.
        init_sync: Compare the models of all ranks and make them equal at the start.
        init_sync_buffers: Make module buffers equal at the start, too.
        sync_buffers: Make module buffers equal at the end of every synchronised backward pass.
        buffer_rules: For each pattern of names, how such module buffers are synchronised at the end of such a pass.
        on_nonfinite: What happens to a step with a gradient that isn't finite; None: nothing is checked.
        compare_every: Every parameter is compared between ranks once in this many windows; None: once in the default
            number of windows, and only while replicas are certainly meant to be equal; 0: never.
    """

    policy: BucketPolicy
    ignored: frozenset[str]
    sparse: frozenset[str]
    inputs_to: torch.device | None
    dim: int
    init_sync: bool
    init_sync_buffers: bool
    sync_buffers: bool
    on_nonfinite: Policy | None = None
    compare_every: int | None = None
    buffer_rules: Mapping[str, str] = field(default_factory=dict)

    def trained(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that aren't ignored, in registration order."""
        return [(name, p) for name, p in self.kept(module) if p.requires_grad]

    def kept(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not ignored, in registration order."""
        return [(name, p) for name, p in module.named_parameters() if name not in self.ignored]

    def kept_buffers(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The module buffers that are not ignored, in registration order."""
        return [(name, buffer) for name, buffer in module.named_buffers() if name not in self.ignored]

    def equal_buffers(self, module: nn.Module, *, is_on: bool) -> list[tuple[str, Tensor]]:
        """The module buffers that are made equal on all ranks at the start, including statistics.

        Args:
            module: The module that has the buffers.
            is_on: Whether buffers without a rule are synchronised.
        """
        wanted = {*Rule} - {Rule.OWN} | ({None} if is_on else set())
        return [each for each in self.kept_buffers(module) if rule_of(each[0], self.buffer_rules) in wanted]


def check_module(module: nn.Module, ignored: Iterable[str] = ()) -> None:
    """Refuse a module that can't be wrapped.

    Raises:
        ConfigurationError: `module` isn't a module, nothing in it is trained, a parameter is uninitialised, or
            parameters are on several kinds of device.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"expected a torch.nn.Module, got a {type(module).__name__}.")
    kept = [(name, p) for name, p in module.named_parameters() if name not in set(ignored)]
    for name, parameter in kept:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name!r} has no shape yet. Run the module once on a sample, so that its lazy layers know "
                f"their sizes, and wrap it then."
            )
    if not any(parameter.requires_grad for _, parameter in kept):
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to keep in step; "
            f"use the module as it is."
        )
    kinds = sorted({parameter.device.type for _, parameter in kept})
    if len(kinds) > 1:
        where = {kind: next(name for name, p in kept if p.device.type == kind) for kind in kinds}
        found = ", ".join(f"{name!r} on {kind}" for kind, name in where.items())
        raise ConfigurationError(f"parameters are on several kinds of device ({found}). Move the module to one.")


def sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that receive sparse gradients: those of embeddings built with `sparse=True`. Pure."""
    owners = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    return frozenset(f"{owner}.weight" if owner else "weight" for owner in owners)


def wrapped_inside(module: nn.Module, world: World) -> frozenset[str]:
    """Names of the parameters and module buffers that wrapped parts of a module keep equal among the same ranks.

    If a part is itself wrapped, these are the names that its own wrapper ignores.
    """
    if getattr(module, "world", None) is world and isinstance(module, nn.parallel.DistributedDataParallel):
        settings: Settings = module.settings  # type: ignore[assignment]
        return frozenset(f"module.{name}" for name in settings.ignored)
    parts = [part for part in module.modules() if getattr(part, "world", None) is world]
    inside = [part for part in parts if isinstance(part, nn.parallel.DistributedDataParallel)]
    tensors = {id(tensor) for part in inside for tensor in (*part.parameters(), *part.buffers())}
    named = (*module.named_parameters(), *module.named_buffers()) if tensors else ()
    return frozenset(name for name, tensor in named if id(tensor) in tensors)


def bucket_policy(
    bucket_cap_mb: float | None, first_bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> BucketPolicy:
    """The bucket policy for sizes in MiB. Pure.

    Raises:
        ConfigurationError: A size isn't a number greater than 0.
    """
    if bucket_cap_mb_list is not None:
        is_list = isinstance(bucket_cap_mb_list, Iterable) and not isinstance(bucket_cap_mb_list, str | bytes)
        if not is_list or not list(bucket_cap_mb_list):
            raise checks.refuse(
                "bucket_cap_mb_list", bucket_cap_mb_list, "sizes of buckets in MiB, at least one, or None for the usual"
            )
    sizes = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_cap_mb": first_bucket_cap_mb}
    sizes |= {f"bucket_cap_mb_list[{number}]": size for number, size in enumerate(bucket_cap_mb_list or ())}
    for name, size in sizes.items():
        if size is not None:
            checks.number(name, size, above=0, most=_LARGEST_MIB)
    if bucket_cap_mb_list:
        return BucketPolicy(tuple(int(size * _MIB) for size in bucket_cap_mb_list))
    cap = DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * _MIB)
    first = min(cap, DEFAULT_FIRST_BUCKET_BYTES) if first_bucket_cap_mb is None else int(first_bucket_cap_mb * _MIB)
    return BucketPolicy((first, cap))


def where_inputs_go(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """The device that `device_ids` and `output_device` name, and on which the module must be. Pure.

    Raises:
        ConfigurationError: There is more than one device, or the module is on another one.
    """
    if device_ids is not None and (isinstance(device_ids, str) or not isinstance(device_ids, Sequence)):
        raise checks.refuse("device_ids", device_ids, "a list with the module's GPU, or None")
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError(f"device_ids={list(device_ids)}: one process drives one device; pass at most one.")
    if not device_ids and output_device is None:
        return None
    devices = {parameter.device for parameter in module.parameters()}
    named = [_index_of(each) for each in (*(device_ids or ()), output_device) if each is not None]
    if any(device.type == "cpu" or device.index != index for device in devices for index in named):
        found = ", ".join(sorted(map(str, devices)))
        raise ConfigurationError(
            f"device_ids={device_ids}, output_device={output_device}, but the module is on {found}. Move it there "
            f"first, or leave both out."
        )
    return devices.pop()


def _index_of(device: int | str | torch.device) -> int | None:
    if isinstance(device, int):
        return device
    try:
        return torch.device(device).index
    except (RuntimeError, TypeError):
        raise checks.refuse("device_ids, output_device", device, "no device; a number, 'cuda:0', or None") from None


def resolve_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether module buffers are made equal (at the start, after every step), by torch 2.13's rules.

    If both arguments are given, torch warns and uses `forward_sync_buffers`, even if the two agree.

    Raises:
        ConfigurationError: An argument is neither True, False nor None.
    """
    checks.switches(
        "",
        otherwise="None to make them equal",
        broadcast_buffers=broadcast_buffers,
        forward_sync_buffers=forward_sync_buffers,
    )
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warn(
                "broadcast_buffers is ignored where forward_sync_buffers is given.",
                FutureWarning,
            )
        return True, bool(forward_sync_buffers)
    both = True if broadcast_buffers is None else bool(broadcast_buffers)
    return both, both


_DELAYED = "every bucket is sent when its last gradient is there. Leave it out."
# torch's arguments that are refused, unless they are None: what to do instead.
_REFUSED = {
    "delay_all_reduce_named_params": _DELAYED,
    "param_to_hook_all_reduce": _DELAYED,
    "mixed_precision": "use torch.autocast. Write `with torch.autocast(device_type, dtype=torch.bfloat16):` around the "
    "forward pass and the loss.",
}


def check_refused(refused: Mapping[str, object]) -> None:
    """Refuse arguments of torch that have no effect here.

    Raises:
        ConfigurationError: An argument isn't None.
    """
    for name, value in refused.items():
        if value is not None:
            raise ConfigurationError(f"{name}= isn't supported: {_REFUSED[name]}")


def check_reduce_dtype(reduce_dtype: Any) -> None:
    """Validate the dtype in which gradients are added.

    Raises:
        ConfigurationError: `reduce_dtype` isn't a floating-point dtype.
    """
    if reduce_dtype is None:
        return
    if not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point and reduce_dtype.itemsize > 1):
        raise checks.refuse("reduce_dtype", reduce_dtype, "a floating-point dtype of at least 16 bits, or None")


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any, module: nn.Module) -> dist.ProcessGroup | None:
    """The process group that the arguments select; None for all ranks.

    If the mesh is a slice of a larger mesh, parameters that tensor parallelism has divided (`DTensor`) are replaced by
    their local parts, as in torch's class.

    Raises:
        ConfigurationError: Both arguments are given, the group isn't a process group, the mesh has more than one
            dimension, or the call is inside `torch.inference_mode()`, whose tensors can never be written to.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "DistributedDataParallel inside torch.inference_mode(): tensors created there can't be trained. Wrap the "
            "model outside."
        )
    validate_group("DistributedDataParallel: process_group", process_group)
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise ConfigurationError("Cannot specify both process_group and device_mesh arguments: pass one of them.")
    if not isinstance(device_mesh, DeviceMesh):
        raise checks.refuse("DistributedDataParallel: device_mesh", device_mesh, "a DeviceMesh of one dimension")
    if device_mesh.ndim != 1:
        raise ConfigurationError(
            f"Only 1D device mesh is supported, but got {device_mesh}, of {device_mesh.ndim} dimensions. Pass the one "
            f"along which the model is replicated: device_mesh=mesh['dp']."
        )
    if is_slice(device_mesh) and isinstance(module, nn.Module):
        localise_parameters(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def resolve_settings(
    world: World,
    module: nn.Module,
    *,
    dim: int,
    devices: tuple[Any, Any],
    buffers: tuple[Any, Any],
    buckets: tuple[Any, Any, Any],
    init_sync: bool,
    on_nonfinite: Policy | None,
    compare_every: int | None,
    reduce_dtype: torch.dtype | None,
    refused: Mapping[str, object],
    buffer_rules: Mapping[str, str] | None = None,
    **switches: Any,
) -> Settings:
    """Check the arguments of a wrapper, compare them between ranks, and return the settings.

    Collective: every rank of the world calls this.

    Args:
        world: The ranks that take part.
        module: The module to wrap.
        dim: The batch dimension.
        devices: `device_ids` and `output_device`.
        buffers: `broadcast_buffers` and `forward_sync_buffers`.
        buckets: `bucket_cap_mb`, `first_bucket_cap_mb` and `bucket_cap_mb_list`.
        init_sync: Compare the models and make them equal.
        on_nonfinite: What happens to a step with a gradient that isn't finite.
        compare_every: How often replicas are compared.
        reduce_dtype: The dtype in which gradients are added over ranks.
        refused: torch's arguments that have to be None.
        buffer_rules: The argument `buffers`.
        switches: torch's switches that are accepted and ignored.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: The ranks were given different arguments. Raised on all ranks.
    """
    made: list[Settings] = []

    def validate() -> dict[str, Any]:
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # as torch reads it
        if isinstance(module, nn.Module):
            ignored |= wrapped_inside(module, world)
        check_module(module, ignored)
        validate_policy(on_nonfinite)
        if compare_every is not None:
            checks.whole("compare_every", compare_every, least=0)
        checks.switches("", init_sync=init_sync)
        checks.switches("", otherwise="None", **switches)
        check_refused(refused)
        check_reduce_dtype(reduce_dtype)
        at_start, after_steps = resolve_buffers(*buffers)
        validate_rules({} if buffer_rules is None else buffer_rules, module, ignored)
        settings = Settings(
            policy=replace(bucket_policy(*buckets), reduce_dtype=reduce_dtype),
            ignored=ignored,
            sparse=sparse_parameters(module),
            inputs_to=where_inputs_go(module, *devices),
            dim=checks.whole("dim", dim),
            init_sync=bool(init_sync),
            init_sync_buffers=at_start,
            sync_buffers=after_steps,
            on_nonfinite=on_nonfinite,
            compare_every=compare_every,
            buffer_rules=dict(buffer_rules or {}),
        )
        made.append(settings)
        return {
            "init_sync": settings.init_sync,
            "whether module buffers are made equal": [at_start, after_steps],
            "dim": settings.dim,
            "bytes of a bucket": list(settings.policy.caps_bytes),
            "on_nonfinite": on_nonfinite,
            "compare_every": compare_every,
            "reduce_dtype": str(reduce_dtype),
            "buffers": list(settings.buffer_rules.items()),
        }

    validate_on_all_ranks(world, "DistributedDataParallel", validate)
    return made[0]
