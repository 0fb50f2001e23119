"""Less communication: ranks step independently, and exchange their changes from time to time.

Plain averaging is Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't Use
Large Mini-Batches, Use Local SGD", 2018). With an outer optimizer it is DiLoCo (Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023). The result differs from that of averaging gradients: between two
exchanges replicas differ.

[Note: outer steps]

    first local step    copy the parameters, which are equal on all ranks
    local steps         every rank changes its parameters
    exchange            the mean over ranks of (parameters now - copy), in `transfer_dtype`
                        parameters = copy, gradient = -mean, and the outer optimizer steps

After the exchange parameters are equal again, so a checkpoint needs no copy: it holds the model, and the state of the
outer optimizer.

[Note: local steps of a divided model]

With `parallelize(local_steps=True)` a replica is divided over the ranks along "shard". FSDP2 divides only over these
ranks, and windows end among them: weights count within a replica. In an exchange each rank averages its parts with the
ranks along "replicate" that have the same parts in other replicas.

    within a replica            its ranks agree in each step whether to skip it ("skip", "raise")
    between all ranks           ranks agree within replicas, then between them, whether some gradient wasn't finite;
                                names and scales of losses are exchanged between all ranks
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from evenstep import checks
from evenstep.errors import CollectiveTimeoutError, ConfigurationError, NonFiniteError, PeerLostError, UsageError
from evenstep.ground.compat.torch_ddp import reshard
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.ground.computing.device import by_kind
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.health import excepthook
from evenstep.ground.health.users_code import warn
from evenstep.optim.consistency import abort_peers
from evenstep.optim.kinds import validate_optimizer
from evenstep.optim.loading import load_exactly
from evenstep.optim.local_sgd.state import make_equal, put_together, take_apart
from evenstep.optim.sharded.flat_segments import Shard
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.replica.gradients.strategies import LocalWindowEnd, ReplicaWindowEnd
from evenstep.replica.gradients.window import drop_grads
from evenstep.replica.monitors.checks import Finder, listed
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.transport.core.object_collectives import exchange

_DEADLINE_S = 5.0  # at the end of a run: how long a finished rank waits for the others


class LocalSGD:
    """Ranks step on their own gradients; every `every` steps parameters become the mean over ranks, or an outer step.

    Example::

        local = evenstep.LocalSGD(model, optimizer, every=8)
        for x, y in loader:
            model.backward(loss_of(model(x), y))
            local.step()
            optimizer.zero_grad()
        local.average()

    With `outer` it is DiLoCo: the mean of the ranks' changes is the gradient of an outer step (see [Note: outer
    steps]), as in ``outer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)``. All ranks take
    the same outer step, from the same parameters. Trained parameters that `outer` doesn't have are averaged.

    Collective: every rank makes it and calls `step` equally often, so give every rank equally many batches, none of
    them empty. Until `close`, backward passes of the model don't exchange gradients: `p.grad` is this rank's mean,
    which may be clipped. Weights of `model.backward` count within a rank; all ranks count equally in a mean. Each rank
    keeps its own optimizer state (momenta). A `Checkpointer` counts and saves only the steps after which parameters are
    equal on all ranks. Pass it this object instead of the optimizers: `Checkpointer(..., model=model,
    local_sgd=local)`. It then saves the inner optimizer's state of every rank and the outer optimizer's state.

    With a model that `parallelize(local_steps=True)` has divided, each replica steps independently, not each rank; see
    [Note: local steps of a divided model].

    A gradient that isn't finite stays on its rank until parameters are averaged. Then all ranks follow the model's
    `on_nonfinite`. With "warn", one warning names the rank and the parameter, on CPUs only. With "skip", that rank has
    skipped its step, and a warning reports this. With "raise", that rank has skipped its step, too, and all ranks raise
    a NonFiniteError instead of averaging.

    Args:
        model: An `evenstep.DistributedDataParallel`, or a model from `parallelize(local_steps=True)`.
        optimizer: A plain torch optimizer over the model's parameters.
        every: Steps from one exchange to the next.
        warmup_steps: Number of first steps, after each of which parameters are averaged, without an outer step.
        outer: A plain torch optimizer over parameters of the model; the same on all ranks. None: plain averaging.
        transfer_dtype: `torch.bfloat16` or `torch.float16`: the dtype in which changes of trained parameters are sent,
            before they are added to the previous values. None: the parameters' dtype.

    Attributes:
        outer: The given outer optimizer; a scheduler may set its rates, equally on all ranks.
        num_steps: Local steps so far.
        peers: The ranks over which parameters are averaged.

    Raises:
        ConfigurationError: The model has the wrong class, an optimizer is sharded or has other parameters, both
            optimizers are the same, a number is out of its range, or the dtype isn't supported.
        UsageError: Gradients have been added since they were last averaged, ranks already step independently, a
            ShardedOptimizer has parameters of the model, or the model was divided without `local_steps`.
        MismatchError: The ranks were given different numbers.
    """

    @excepthook.for_users
    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: optim.Optimizer,
        *,
        every: int,
        warmup_steps: int = 0,
        outer: optim.Optimizer | None = None,
        transfer_dtype: torch.dtype | None = None,
    ) -> None:
        with abort_peers(model):
            if not isinstance(model, DistributedDataParallel):
                raise checks.refuse("LocalSGD: model", model, "an evenstep.DistributedDataParallel")

        peers = model.peers
        if peers is None:  # on all ranks
            raise UsageError(
                "LocalSGD: the model is divided over ranks, and no rank can step without the others. Divide it along "
                '"shard" alone: evenstep.parallelize(module, local_steps=True), or average in every step.'
            )

        def validate() -> dict[str, Any]:
            if model.world.virtual_ranks is not None:
                raise UsageError(
                    "in reproducible mode: the result of independent steps depends on the number of ranks."
                )
            _validate(model, "optimizer", optimizer)
            if outer is not None:
                _validate(model, "outer", outer)
                if outer is optimizer:
                    raise ConfigurationError("outer: this is the optimizer of the local steps. Make another one.")
            if model.monitors.options.has_divided():
                raise UsageError(
                    "the model has a ShardedOptimizer, which needs gradients that are averaged over ranks, and "
                    "LocalSGD doesn't average them. Give its parameters to the plain optimizer."
                )
            if transfer_dtype not in (None, torch.bfloat16, torch.float16):
                raise checks.refuse("transfer_dtype", transfer_dtype, "torch.bfloat16, torch.float16, or None")
            if model.engine.ending.owner is not None:
                raise UsageError("the model has another LocalSGD. Close that first.")
            if model.engine.is_in_window:
                raise UsageError("gradients have been added but not averaged. Make it before the loop.")
            return {
                "every": checks.whole("every", every, least=1),
                "warmup_steps": checks.whole("warmup_steps", warmup_steps, least=0),
                "outer": repr(outer),  # includes its options: different options would give different steps
                "transfer_dtype": str(transfer_dtype),
            }

        validate_on_all_ranks(peers.everybody, "LocalSGD", validate)
        self.model, self.peers = model, peers
        self.optimizer = optimizer
        self.every = int(every)  # as plain numbers, from any integer type
        self.warmup_steps = int(warmup_steps)
        self.outer, self.transfer_dtype = outer, transfer_dtype
        self.num_steps = 0
        self._exchanges_changes = not (outer is None and transfer_dtype is None)
        self._before: list[Tensor] | None = None  # trained parameters at the last exchange; None: equal ones
        self._usual_ending = model.engine.ending
        in_replica = model.world.world_size
        model.engine.ending = ReplicaWindowEnd(in_replica, self) if model.is_divided else LocalWindowEnd(self)
        policy = model.settings.on_nonfinite
        self._policy = policy if policy in ("skip", "raise") or model.world.device.type == "cpu" else None
        self._finder = Finder()
        self._bad: dict[str, None] = {}  # names of this rank's gradients that weren't finite since the last average
        self._num_left_out = 0
        self._has_warned = False
        self._scaler: torch.amp.GradScaler | None = None
        self._set_apart(True)
        # Registered to run before replicas are compared, and before a Checkpointer saves for the last time.
        peers.everybody.before_close.insert(0, partial(_average_at_end, weakref.ref(self)))

    def step(self, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Step on this rank's gradients. Collective if ranks exchange now; returns whether parameters are equal.

        Args:
            scaler: The `torch.amp.GradScaler` that scaled the losses. It steps the optimizer, and is updated. Ranks
                overflow independently; when parameters are averaged all ranks get the smallest scale.

        Raises:
            ConfigurationError: The scaler isn't a GradScaler.
            UsageError: Gradients are scaled but no scaler was passed, or gradients of a divided model haven't been
                added over its ranks yet. Nothing was stepped.
            NonFiniteError: See the class. Each rank still has its own parameters.
        """
        engine = self.model.engine
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            with abort_peers(self.model):
                raise checks.refuse("LocalSGD.step: scaler", scaler, "a torch.amp.GradScaler, or None")
        is_scaled = scaler is not None and scaler.is_enabled()
        if self.is_open:
            self._end_window()
            if engine.was_scaled and not is_scaled and any(p.grad is not None for p in engine.parameters):
                raise UsageError(
                    "LocalSGD.step: the gradients were scaled by a GradScaler. Call local.step(scaler=scaler), in "
                    "place of scaler.step and scaler.update."
                )
            if not is_scaled:
                self._look_at_gradients()
        if self.is_open and self._exchanges_changes and self._before is None:
            self._before = [_real(parameter).clone() for parameter in engine.parameters]
        if is_scaled and scaler is not None:
            self._scaler = scaler
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.num_steps += 1
        if not self.is_open:
            return True
        engine.is_apart = True
        is_warming_up = self.num_steps <= self.warmup_steps
        is_due = is_warming_up or (self.num_steps - self.warmup_steps) % self.every == 0
        if is_due:
            self._exchange(None if is_warming_up else self.outer)
        return is_due

    def _end_window(self) -> None:
        """End this rank's accumulation window, if it is open.

        Raises:
            UsageError: Other ranks would have to take part.
        """
        engine = self.model.engine
        if not self.model.is_divided:
            engine.end_local_window()
        elif engine.is_in_window:
            raise UsageError(
                "LocalSGD.step: gradients of a divided model have been added on this rank alone. Leave "
                "model.accumulate() for the last backward pass before the step."
            )

    @property
    def is_open(self) -> bool:
        """Whether ranks step independently now."""
        return self.model.engine.ending.owner is self

    def average(self) -> None:
        """Collective: average parameters and floating-point module buffers over ranks, without an outer step.

        Raises:
            NonFiniteError: See the class. Each rank still has its own parameters.
        """
        self._exchange(None)

    @torch.no_grad()
    def _exchange(self, outer: optim.Optimizer | None) -> None:
        """Collective: average, and then step the outer optimizer; see [Note: outer steps].

        Args:
            outer: The outer optimizer; None: parameters become the mean.

        Raises:
            NonFiniteError: See the class. Each rank still has its own parameters.
        """
        engine = self.model.engine
        is_bad = self._policy is not None and self._any_in_replica(bool(self._bad))
        if self.peers.transport.world_size > 1 or (outer is not None and self._before is not None):
            reshard(self.model.module)  # else the model would use parameters that were gathered before the average
            changes = self._changes()
            by_change = {_real(parameter).data_ptr() for parameter in engine.parameters} if changes else set()
            kept = (_real(each) for each in self.model._kept_tensors())
            self._average_all([*changes, *(each for each in kept if each.data_ptr() not in by_change)], is_bad)
            self._apply(changes, outer)
        elif is_bad:
            self._conclude()
        self._before, engine.is_apart = None, False

    def _changes(self) -> list[Tensor]:
        """This rank's change of each trained parameter since the last exchange, in new tensors."""
        if self._before is None:
            return []
        moved = zip(self.model.engine.parameters, self._before, strict=True)
        return [(_real(parameter) - before).to(self.transfer_dtype or before.dtype) for parameter, before in moved]

    def _apply(self, changes: Sequence[Tensor], outer: optim.Optimizer | None) -> None:
        """Step from the last exchange's parameters: by the mean of all ranks' changes, or by the outer optimizer."""
        stepped = {id(p) for group in outer.param_groups for p in group["params"]} if outer is not None else set()
        parameters = self.model.engine.parameters[: len(changes)]
        grads = [parameter.grad for parameter in parameters]
        for parameter, before, change in zip(parameters, self._before or (), changes, strict=True):
            parameter.grad = None
            _real(parameter).copy_(before)
            if id(parameter) in stepped:
                parameter.grad = torch.zeros_like(parameter)
                _real(parameter.grad).sub_(change)
            else:
                _real(parameter).add_(change)
        if outer is not None and changes:
            outer.step()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad

    def _average_all(self, kept: Iterable[Tensor], is_bad: bool) -> None:
        """Collective: average tensors over ranks in place, and agree on the smallest loss scale.

        Args:
            kept: This rank's tensors.
            is_bad: Whether a gradient of this replica wasn't finite.
        """
        for number, tensors in enumerate(by_kind(each for each in kept if each.is_floating_point())):
            # Send `is_bad` as one more number, instead of in a separate message.
            has_flag = number == 0 and self._policy is not None
            flag = [tensors[0].new_tensor([float(is_bad)])] if has_flag else []
            flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), *flag])
            self.peers.transport.all_reduce(flat, "mean").wait()
            if has_flag and bool(flat[-1] > 0):
                self._conclude()
            parts = torch.split_with_sizes(flat[: len(flat) - len(flag)], [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        if self._scaler is not None:
            self._agree_on_scale(self._scaler)

    def _look_at_gradients(self) -> None:
        """Check this step's gradients, and drop them if the step is to be skipped.

        Collective within a divided replica.
        """
        if self._policy is None or (self._policy == "warn" and (self._has_warned or self._bad)):
            return
        engine = self.model.engine
        self._finder.check_grads(engine.names, engine.parameters)
        found = self._finder.take()
        self._bad |= dict.fromkeys(found)
        if self._policy != "warn" and self._any_in_replica(bool(found)):
            self._num_left_out += self.model.world.is_main or not self.model.is_divided
            drop_grads(engine.parameters)

    def _any_in_replica(self, is_so: bool) -> bool:
        """Whether a condition holds on any rank of this divided replica. Collective among these ranks."""
        if not self.model.is_divided:
            return is_so
        flag = torch.tensor([float(is_so)], device="cpu")
        self.model.engine.control.all_reduce(flag, "max").wait()
        return bool(flag)

    def _conclude(self) -> None:
        """Collective: report the ranks and parameters whose gradients were not finite."""
        world, policy = self.peers.everybody, self._policy
        received = exchange(self.peers.control, {"names": list(self._bad), "left_out": self._num_left_out})
        self._bad, self._num_left_out = {}, 0
        num_left_out = sum(each["left_out"] for each in received)
        text = "; ".join(f"rank {rank}: {listed(each['names'])}" for rank, each in enumerate(received) if each["names"])
        message = f"a gradient was infinite or not a number since parameters were last averaged, on {text}."
        if policy == "raise":
            raise NonFiniteError(f"{message} That rank skipped such steps; parameters were not averaged.")
        if self.model.monitors.nonfinite is not None:
            self.model.monitors.nonfinite.num_skipped += num_left_out
        if policy == "skip":
            end = f"Skipped: {checks.counted(num_left_out, 'step')} of such ranks (in all {self.model.skipped_steps})."
        else:
            end = (
                "It is now in all ranks' parameters. This warning comes once; on_nonfinite='skip' skips such steps, "
                "'raise' ends the run, None turns the check off."
            )
        if world.is_main and not (policy == "warn" and self._has_warned):
            warn(f"{message} {end}")
        self._has_warned = True

    def _agree_on_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Collective: use the smallest loss scale of all ranks, because ranks have overflowed independently."""
        state = scaler.state_dict()
        received = exchange(self.peers.control, [state["scale"], state["_growth_tracker"]])
        scale, tracker = (min(each[i] for each in received) for i in range(2))
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})

    def close(self) -> None:
        """Collective: average once more; from now on backward passes exchange gradients again.

        Optimizer state becomes equal on all ranks, too, because with different momenta ranks would step differently on
        equal gradients: tensors are averaged, and numbers are rank 0's. Existing gradients are this rank's alone, and
        are dropped. Afterwards `step` only steps the optimizer. A divided model can't be trained any more, because
        nothing would add its gradients over replicas.

        Raises:
            NonFiniteError: See the class. Ranks still step independently.
        """
        world = self.peers.everybody
        if not self.is_open:
            return
        self.average()
        self._leave()
        if world.world_size == 1 or self.model.is_divided:
            return
        try:
            make_equal(self.optimizer, self.peers)
        except ConfigurationError as error:  # on all ranks
            if world.is_main:
                warn(
                    f"LocalSGD.close: the optimizer's state differs between ranks and can't be averaged: {error} To "
                    f"continue training make a new optimizer; with this one ranks would take different steps.",
                )

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, whether this object is closed, and the outer optimizer's state.

        Save it when ranks have equal parameters, such as right after an exchange.
        """
        kept = {"num_steps": self.num_steps, "is_closed": not self.is_open}
        return kept if self.outer is None else {**kept, "outer": self.outer.state_dict()}

    def state_shards(self) -> tuple[dict[str, Any], list[Shard]]:
        """Collective: as `state_dict`, plus the state of the ranks' optimizers, which differs between ranks.

        Returns:
            (the state that is equal on all ranks, this rank's shards). `evenstep.Checkpointer` writes each rank's
            shards; `load_state_dict` takes the two put together.

        Raises:
            ConfigurationError: The state has different shapes on different ranks. Raised on all ranks.
        """
        state, shards = take_apart(self.optimizer, self.peers)
        return {**self.state_dict(), **state}, shards

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A checkpoint's state includes the optimizer's, but not the parameters.

        On the same number of ranks each rank gets its own optimizer state back. On another number every rank gets the
        mean over all saved ranks.

        Args:
            state: The result of `state_dict`, or of `state_shards` as a `Checkpointer` has put it together.

        Raises:
            ConfigurationError: The state isn't one of this class.
        """
        where = "LocalSGD.load_state_dict"
        if not isinstance(state, Mapping):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        num_steps = checks.whole(f"{where}: num_steps", state.get("num_steps"), least=0)
        if "ranks" in state:
            load_exactly(self.optimizer, put_together(state, self.optimizer, self.peers))
        if self.outer is not None and "outer" in state:
            load_exactly(self.outer, state["outer"])
        self.num_steps = num_steps
        self._before, self.model.engine.is_apart = None, False
        if self.is_open and state.get("is_closed", False):
            self._leave()

    def _leave(self) -> None:
        """Make backward passes exchange gradients again, after parameters have become equal."""
        engine = self.model.engine
        engine.end_local_window()
        engine.ending = self._usual_ending
        if self.peers.everybody.world_size > 1:
            drop_grads(engine.parameters)
        self._set_apart(False)

    def _set_apart(self, is_apart: bool) -> None:
        """Stop comparisons between ranks that step independently. The ranks of one divided replica still compare."""
        observers, nonfinite = self.model.engine.observers, self.model.monitors.nonfinite
        for observer in [each for each in observers if each is nonfinite or not self.model.is_divided]:
            observer.set_apart(is_apart)


def _average_at_end(reference: weakref.ref[LocalSGD]) -> None:
    """Average at the end of a successful run between two exchanges.

    Collective if all ranks have made equally many steps.
    """
    local = reference()
    if local is None or not local.model.engine.is_apart:
        return
    world = local.peers.everybody
    try:
        world.control.set_timeout(_DEADLINE_S)
        num_steps = set(world.exchange(local.num_steps, what="the last exchange of LocalSGD"))
        if len(num_steps) == 1:
            local.average()
            return
        why = f"ranks have made {min(num_steps)} to {max(num_steps)} steps"
    except (CollectiveTimeoutError, PeerLostError) as error:
        why = str(error)
    warn(
        f"rank {world.rank}: LocalSGD: the steps since the last exchange were not averaged at the end of the run, "
        f"because {why}. Give all ranks equally many steps.",
    )


def _validate(model: DistributedDataParallel, name: str, optimizer: Any) -> None:
    """Refuse an object that isn't a plain optimizer over parameters of the model.

    Raises:
        ConfigurationError: The object is refused; the message names the argument.
    """
    validate_optimizer(name, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        raise checks.refuse(name, optimizer, "a plain torch optimizer: every rank steps all parameters")
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise ConfigurationError(
            f"{name}: its parameter of shape {list(strangers[0].shape)} isn't one of the model's, so it would never be "
            f"averaged."
        )


def _real(tensor: Tensor) -> Tensor:
    """View this rank's part of a tensor as real numbers, outside of autograd."""
    tensor = local_part(tensor.detach())
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
