"""`parallelize` and `attach`: a model over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.coordination.mesh import DATA
from evenstep.ground.health import excepthook
from evenstep.parallel.blocks import Blocks, choose_blocks, validate_plan
from evenstep.parallel.layout import is_divided_module
from evenstep.parallel.model import DividedModel
from evenstep.parallel.optimizers import validate_none_left, validate_none_yet
from evenstep.replica.module_buffers import broadcast
from evenstep.replica.monitors.checks import Policy, validate_policy
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.replica.wrapper.model_check import validate_same_model
from evenstep.world import World


@excepthook.for_users
def parallelize(
    module: nn.Module,
    world: World | None = None,
    *,
    tensor_plan: Any = None,
    blocks: Blocks = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    on_nonfinite: Policy | None = "warn",
    broadcast_buffers: bool | None = None,
    compare_every: int | None = None,
    local_steps: bool = False,
) -> DistributedDataParallel:
    """Divide a model over the ranks of the world's mesh with torch's own functions, for evenstep's training loop.

    Collective: every rank calls this, with the same model, before optimizers are made. Parameters and module buffers
    become equal to rank 0's first. Then, for each dimension that the mesh (`evenstep.init(mesh=...)`) has:

        tensor              `parallelize_module` with `tensor_plan`
        shard               `fully_shard` of each of the `blocks`, then of the whole model; with "replicate", HSDP
        replicate, no shard gradients are averaged by evenstep

    Without a mesh, or with "replicate" alone, this is `DistributedDataParallel(module)`.

    Args:
        module: The whole model, on every rank.
        world: The ranks; None: the current world.
        tensor_plan: The plan for torch's `parallelize_module`: styles by the names of modules, `*` for any name.
        blocks: The modules that are sharded by themselves: class names or classes; or a whole number, the least number
            of parameters of a block; or a function of (name, module); None: the members of every `nn.ModuleList`.
        reshard_after_forward: As in torch's `fully_shard`, for every block.
        mp_policy: torch's `MixedPrecisionPolicy`; needs "shard".
        offload_policy: torch's `CPUOffloadPolicy`; needs "shard".
        on_nonfinite: As in `DistributedDataParallel`.
        broadcast_buffers: As in `DistributedDataParallel`.
        compare_every: As in `DistributedDataParallel`; in a divided model, ranks with the same parts are compared.
        local_steps: Prepare the model for `LocalSGD`, which it then needs for training: FSDP2 divides over "shard"
            alone, and each replica (along "replicate") steps independently. No effect without "shard".

    Returns:
        The model, with `backward`, `microbatches` and so on; `.module` has torch's modules.

    Raises:
        ConfigurationError: An argument is wrong, or doesn't fit the mesh or the model. Raised on all ranks.
        UsageError: An optimizer has the model's parameters already, the world is in reproducible mode, or the model is
            divided already.
        MismatchError: The ranks' models or arguments differ. Raised on all ranks.
    """
    world = worlds.chosen(world, "parallelize")
    names = () if world.mesh is None else (world.mesh.mesh_dim_names or ())
    chosen: list[nn.Module] = []

    def validate() -> dict[str, Any]:
        _validate_mode(module, world, "parallelize", on_nonfinite)
        if is_divided_module(module):
            raise UsageError("parallelize: the model is divided already. Call evenstep.attach(model).")
        meta = next((name for name, p in module.named_parameters() if p.is_meta), None)
        if meta is not None:
            raise ConfigurationError(
                f"parallelize: {meta!r} is on the device meta, so it has no values that ranks could get. Divide the "
                f"model with torch's fully_shard, materialise it (to_empty, then initialise), and call evenstep.attach."
            )
        chosen[:] = choose_blocks(module, blocks)
        _validate_arguments(names, tensor_plan, mp_policy, offload_policy)
        _validate_local_steps("parallelize", local_steps, names, offload_policy)
        validate_plan(module, tensor_plan)
        validate_none_yet(module, "parallelize")
        facts = {"reshard_after_forward": reshard_after_forward, "local_steps": bool(local_steps)}
        return facts | {"the number of blocks": len(chosen)}

    _validate_together(module, world, "parallelize", validate)
    if not {"shard", "tensor"} & set(names):
        return DistributedDataParallel(
            module,
            world=world,
            on_nonfinite=on_nonfinite,
            broadcast_buffers=broadcast_buffers,
            compare_every=compare_every,
        )
    assert world.mesh is not None
    _make_equal(module, world.model_ranks)
    if tensor_plan is not None:
        from torch.distributed.tensor.parallel import parallelize_module  # takes seconds to import

        parallelize_module(module, world.mesh["tensor"], tensor_plan)
    if "shard" in names:
        from torch.distributed.fsdp import fully_shard

        policies = {"mp_policy": mp_policy, "offload_policy": offload_policy}
        options = {name: policy for name, policy in policies.items() if policy is not None}
        is_hybrid = "replicate" in names and not local_steps
        mesh = world.mesh["replicate", "shard"] if is_hybrid else world.mesh["shard"]
        for each in [*chosen, module]:
            fully_shard(each, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)
    return DividedModel(
        module,
        world,
        who="parallelize",
        on_nonfinite=on_nonfinite,
        broadcast_buffers=broadcast_buffers,
        compare_every=compare_every,
        local_steps=bool(local_steps),
    )


@excepthook.for_users
def attach(
    module: nn.Module,
    world: World | None = None,
    *,
    on_nonfinite: Policy | None = "warn",
    broadcast_buffers: bool | None = None,
    compare_every: int | None = None,
    local_steps: bool = False,
) -> DistributedDataParallel:
    """Prepare a model that torch's functions have divided for evenstep's training loop.

    Collective: every rank calls this, after `fully_shard` and `parallelize_module`, before or after optimizers are
    made. Parameters stay as they are. Without a mesh in the world, all ranks have different samples.

    Args:
        module: The model; if it isn't divided, it gets a `DistributedDataParallel`.
        world: The ranks; None: the current world.
        on_nonfinite: As in `DistributedDataParallel`.
        broadcast_buffers: As in `DistributedDataParallel`.
        compare_every: As in `parallelize`.
        local_steps: As in `parallelize`; `fully_shard` must have been called with `world.mesh["shard"]`.

    Returns:
        As `parallelize`.

    Raises:
        ConfigurationError: The model is divided over other ranks than the world's mesh. Raised on all ranks.
        UsageError: An optimizer was made before the model was divided, or the world is in reproducible mode. Raised on
            all ranks.
        MismatchError: The ranks' models differ. Raised on all ranks.
    """
    world = worlds.chosen(world, "attach")

    def validate() -> dict[str, Any]:
        _validate_mode(module, world, "attach", on_nonfinite)
        if isinstance(module, DistributedDataParallel):
            raise UsageError("attach: the model is already wrapped by evenstep.")
        is_divided = is_divided_module(module)
        if is_divided:
            validate_none_left(module, "fully_shard")
            names = ("no mesh",) if world.mesh is None else (world.mesh.mesh_dim_names or ())
            _validate_local_steps("attach", local_steps, names)
        elif world.mesh is not None and world.model_ranks.world_size > world.data_size:
            raise ConfigurationError(
                "attach: the mesh has ranks along tensor, but no parameter of the model is divided. Call torch's "
                'parallelize_module(model, world.mesh["tensor"], plan) first, or evenstep.parallelize.'
            )
        return {"whether the model is divided": is_divided, "local_steps": bool(local_steps)}

    _validate_together(module, world, "attach", validate)
    if not is_divided_module(module):
        return DistributedDataParallel(
            module,
            world=world,
            on_nonfinite=on_nonfinite,
            broadcast_buffers=broadcast_buffers,
            compare_every=compare_every,
        )
    return DividedModel(
        module,
        world,
        who="attach",
        on_nonfinite=on_nonfinite,
        broadcast_buffers=broadcast_buffers,
        compare_every=compare_every,
        local_steps=bool(local_steps),
    )


def _validate_together(module: nn.Module, world: World, who: str, validate: Callable[[], dict[str, Any]]) -> None:
    """Validate on all ranks, and check that all ranks of a pipeline stage have the same model.

    Collective: every rank calls this.

    Args:
        module: The model.
        world: All ranks.
        who: The caller, for messages.
        validate: As in `validate_on_all_ranks`; its result is compared within a stage.
    """
    stage = world.model_ranks
    facts: dict[str, Any] = {}

    def alone() -> dict[str, Any]:
        facts.update(validate())
        return {}

    def with_stage() -> dict[str, Any]:
        validate_on_all_ranks(stage, who, lambda: facts)
        validate_same_model(module.named_parameters(), module.named_buffers(), stage.exchange)
        return {}

    validate_on_all_ranks(world, who, alone)
    validate_on_all_ranks(world, who, with_stage)


def _validate_mode(module: Any, world: World, who: str, on_nonfinite: Any) -> None:
    if not isinstance(module, nn.Module):
        raise checks.refuse(f"{who}: module", module, "a torch.nn.Module")
    if world.virtual_ranks is not None:
        raise UsageError(
            f"{who} in reproducible mode: a divided layer adds in another order than an undivided one. Use "
            f"DistributedDataParallel, or leave reproducible=True out."
        )
    if torch.is_inference_mode_enabled():
        raise ConfigurationError(f"{who} inside torch.inference_mode(): tensors created there can't be trained.")
    validate_policy(on_nonfinite)


def _validate_arguments(names: tuple[str, ...], tensor_plan: Any, mp_policy: Any, offload_policy: Any) -> None:
    """Refuse an argument for a dimension that the mesh lacks, and a dimension without its argument."""
    for name, given, dimension in (
        ("tensor_plan", tensor_plan, "tensor"),
        ("mp_policy", mp_policy, "shard"),
        ("offload_policy", offload_policy, "shard"),
    ):
        if given is not None and dimension not in names:
            raise ConfigurationError(
                f'parallelize: {name} is given, but the mesh has no dimension "{dimension}". Call '
                f'evenstep.init(mesh={{"{dimension}": ...}}); 1 is a size, too.'
            )
    if "tensor" in names and tensor_plan is None:
        raise ConfigurationError(
            'parallelize: the mesh has the dimension "tensor", but there is no tensor_plan. Pass '
            "one, as for torch's parallelize_module, or leave the dimension out."
        )


def _validate_local_steps(who: str, local_steps: Any, names: tuple[str, ...], offload_policy: Any = None) -> None:
    """Refuse features that replicas with independent steps can't have."""
    checks.switch(f"{who}: local_steps", local_steps)
    found = [*(name for name in names if name not in DATA), *(["offload_policy"] if offload_policy else [])]
    if local_steps and found:
        raise ConfigurationError(
            f'{who}: local_steps=True is for models that are divided along "shard" alone, with replicas along '
            f'"replicate", whose parts are on their ranks\' devices. But there is {", ".join(found)}.'
        )


def _make_equal(module: nn.Module, ranks: World) -> None:
    """Collective: give all ranks the first rank's parameters and module buffers."""
    if ranks.is_initialised:
        module.to(ranks.device)
    tensors = [*(p.data for p in module.parameters()), *module.buffers()]
    broadcast(tensors, ranks.transport)
