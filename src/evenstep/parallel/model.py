"""The class that `parallelize` and `attach` return: a divided model with the training loop of a replicated one."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_ddp import ShardedParts
from evenstep.optim.clipping import clip_grad_norm_
from evenstep.parallel.exchange import MeshExchange
from evenstep.parallel.layout import validate_layout
from evenstep.parallel.replicas import find_replicas
from evenstep.replica.batches import DummyBatch, pad_parts
from evenstep.replica.channels import Peers, bucket_transport, channel_of, validate_thread
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.strategies import ReplicaWindowEnd
from evenstep.replica.monitors.checks import Monitors, Policy
from evenstep.replica.normalization.sync_batchnorm import replace_torchs
from evenstep.replica.wrapper.assembly import Divided, build_engine
from evenstep.replica.wrapper.distributed import Batch, DistributedDataParallel
from evenstep.replica.wrapper.settings import Settings, resolve_settings
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.world import World


class DividedModel(DistributedDataParallel):
    """A model that FSDP2 or tensor parallelism has divided over ranks, with the training loop of a replicated model.

    `backward`, `microbatches`, `accumulate`, `unused_parameters`, empty shares and `on_nonfinite` have the same meaning
    as for a `DistributedDataParallel`: gradients are exact global means. `.module` is the model itself, with torch's
    methods (`unshard`, `set_modules_to_forward_prefetch`). Within an accumulation window each rank has whole gradients
    of sharded parameters (`set_requires_gradient_sync(False)`). They take memory, and `zero_grad` doesn't drop them.

    Made by `evenstep.parallelize` and `evenstep.attach`.

    Args:
        module: The divided model.
        world: All ranks, with a mesh.
        who: The function that was called, for messages.
        on_nonfinite: As in `DistributedDataParallel`; each rank inspects its part of the sum over ranks.
        broadcast_buffers: As in `DistributedDataParallel`, among the data ranks.
        compare_every: As in `DistributedDataParallel`, between ranks with the same parts.
        local_steps: Each replica steps independently: see `parallelize`.
    """

    is_divided = True

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        who: str,
        on_nonfinite: Policy | None,
        broadcast_buffers: bool | None,
        compare_every: int | None,
        local_steps: bool,
    ) -> None:
        nn.Module.__init__(self)
        validate_thread(world, self)
        whole, world = world, world.along("shard") if local_steps else world
        ranks = world.model_ranks
        settings = resolve_settings(
            ranks,
            module,
            dim=0,
            devices=(None, None),
            buffers=(broadcast_buffers, None),
            buckets=(None, None, None),
            init_sync=True,
            on_nonfinite=on_nonfinite,
            compare_every=compare_every,
            reduce_dtype=None,
            refused={},
        )
        if settings.sparse:
            raise ConfigurationError(
                f"{who}: {min(settings.sparse)!r} has sparse gradients, which aren't added over the ranks of a mesh. "
                f"Build the embedding with sparse=False."
            )
        self._sharded = ShardedParts(module)
        validate_layout(module, self._sharded.parameters, world, who)
        self.module = replace_torchs(module)
        self.device = world.device
        self.device_type = self.device.type
        self.device_ids = self.output_device = None
        self.find_unused_parameters = self.gradient_as_bucket_view = self.static_graph = False
        self.skip_all_reduce_unused_params = self.batched_grad_copy = self.lazy_bucket_allocation = False
        self.bucket_bytes_cap_list: list[int] = []
        self.device_mesh = whole.mesh
        self._everybody, self._data = world, world.data_parallel
        self._peers: Peers | None = None
        self._set_up(ranks, settings, bucket_transport(ranks, self))
        self._dummy = DummyBatch(self.dim)
        if local_steps:
            self.engine.ending = ReplicaWindowEnd(world.world_size)
            self._peers = self._find_peers(whole)

    def _find_peers(self, whole: World) -> Peers:
        """Collective: the ranks over which `LocalSGD` averages this rank's parts.

        Args:
            whole: All ranks, with a mesh.
        """
        assert whole.mesh is not None
        names, place = whole.mesh.mesh_dim_names or (), whole.mesh.get_coordinate()
        number = place[names.index("replicate")] if place is not None and "replicate" in names else 0
        replicas = whole.along("replicate")
        return Peers(
            whole,
            for_messages(channel_of(self, whole, "local steps", whole.device), whole.device),
            channel_of(self, replicas, "local steps", whole.device),
            number,
            whole.mesh,
        )

    @property
    def peers(self) -> Peers | None:
        """See `DistributedDataParallel`; None without `local_steps`."""
        return self._peers

    def _build_engine(self, world: World, settings: Settings, transport: Transport) -> tuple[Engine, Monitors]:
        data = transport if self._data is world else channel_of(self, self._data, "gradients", world.device)
        divided = Divided(
            data,
            find_replicas=lambda parameters: find_replicas(parameters, self._everybody, self),
            exchange=lambda trained: MeshExchange(trained, self._sharded, data),
        )
        return build_engine(self.module, world, settings, transport, divided, recorder=self._recorder())

    def _follow_changes(self) -> None:
        """Check only for parameters that were unfrozen: FSDP2 itself registers parameters as it gathers them.

        Raises:
            UsageError: A frozen parameter was unfrozen.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            raise UsageError(
                "a parameter that was frozen when the divided model was attached is trained now; its gradient would "
                "not be averaged. Freeze parameters after attaching it, or attach the model again."
            )

    def _pad(self, parts: list[Batch], batch: Batch) -> list[Batch]:
        """Give all data ranks equally many parts, because FSDP2 gathers parameters in every part."""
        if not self._sharded or self._data.world_size == 1:
            return super()._pad(parts, batch)
        most = torch.tensor([len(parts)], device="cpu")
        self.engine.control.all_reduce(most, "max").wait()
        return pad_parts(parts, int(most), batch, self.dim)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip all gradients by the norm of the whole gradient, as `evenstep.clip_grad_norm_` does. Collective.

        Args:
            max_norm: See `evenstep.clip_grad_norm_`.
            norm_type: See `evenstep.clip_grad_norm_`.
            error_if_nonfinite: See `evenstep.clip_grad_norm_`.
        """
        return clip_grad_norm_(self.engine.parameters, max_norm, norm_type, error_if_nonfinite)

    def extra_repr(self) -> str:
        """The text added to the module's when this is printed."""
        mesh = self.device_mesh
        names = () if mesh is None else (mesh.mesh_dim_names or ())
        sizes = {} if mesh is None else dict(zip(names, mesh.shape, strict=True))
        return f"rank {self.world.rank}/{self.world.world_size}, {sizes}"

    # ------------------------------------------------------------------ what a divided model can't do

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Refuse a hook: there are no buckets.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "register_comm_hook: FSDP2 exchanges the gradients of a divided model. Use "
            "model.module.set_all_reduce_hook or model.module.set_custom_reduce_scatter."
        )

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse `join`: every rank has parts of the parameters that all other ranks need.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "join: a divided model needs all ranks in every pass. Use evenstep.DataLoader, which gives all ranks "
            "equally many steps, if necessary with an empty share."
        )

    join_hook = join

    def __getstate__(self) -> NoReturn:
        """Refuse pickling: a rank has only parts of the model.

        Raises:
            UsageError: Always.
        """
        raise UsageError("a divided model can't be pickled or copied; save it with a Checkpointer.")
