"""Less communication: ranks step on their own, and average their parameters now and then.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019). Not the same answer as averaging gradients:
between two averages replicas differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from evenstep import checks
from evenstep.device import by_kind
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.health import excepthook
from evenstep.ground.health.users_code import warn
from evenstep.optim.consistency import abort_peers
from evenstep.optim.kinds import validate_optimizer
from evenstep.optim.loading import load_exactly
from evenstep.optim.local_sgd.state import make_equal, put_together, take_apart
from evenstep.optim.sharded.flat_segments import Shard
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.replica.gradients.strategies import LocalWindowEnd
from evenstep.replica.gradients.window import drop_grads
from evenstep.replica.monitors.checks import Finder, listed
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.transport.core.object_collectives import exchange


class LocalSGD:
    """Ranks step on their own gradients; every `every` steps parameters become the mean over ranks.

    Example::

        local = evenstep.LocalSGD(model, optimizer, every=8)
        for x, y in loader:
            model.backward(loss_of(model(x), y))
            local.step()
            optimizer.zero_grad()
        local.average()

    Collective: every rank makes it and calls `step` equally often, so give every rank equally many batches, none of
    them empty. From now on backward passes of the model don't exchange gradients, until `close`: `p.grad` is this
    rank's mean, which may be clipped. Weights of `model.backward` count within a rank; all ranks count the same in a
    mean. What the optimizer keeps (momenta) stays each rank's own. A `Checkpointer` counts and saves the steps behind
    which parameters are the same on all ranks. It is given this object, and not the optimizer, whose state on every
    rank is saved with it: `Checkpointer(..., model=model, local_sgd=local)`.

    A gradient that isn't finite is this rank's alone until parameters are averaged; then all ranks know of it, and do
    what the model's `on_nonfinite` says: "warn" says it once, with rank and parameter, on CPUs; "skip" has left out
    that rank's step, and says so; "raise" has, too, and is a NonFiniteError of all ranks in place of the average.

    Args:
        model: An `evenstep.DistributedDataParallel`.
        optimizer: A plain torch optimizer over its parameters.
        every: Steps from one average to the next.
        warmup_steps: Steps at the beginning after each of which parameters are averaged.

    Raises:
        ConfigurationError: No such model, a divided optimizer, one of other parameters, or a number out of its range.
        UsageError: Gradients have been added since they were last averaged, ranks step on their own already, or a
            ShardedOptimizer has parameters of the model.
        MismatchError: The ranks were given different numbers.
    """

    @excepthook.for_users
    def __init__(
        self, model: DistributedDataParallel, optimizer: optim.Optimizer, *, every: int, warmup_steps: int = 0
    ) -> None:
        with abort_peers(model):
            if not isinstance(model, DistributedDataParallel):
                raise checks.refuse("LocalSGD: model", model, "an evenstep.DistributedDataParallel")

        def validate() -> dict[str, Any]:
            if model.is_divided:
                raise UsageError(
                    "the model is divided over ranks, and no rank can step without the others. Use it with "
                    "evenstep.DistributedDataParallel, or average in every step."
                )
            if model.world.virtual_ranks is not None:
                raise UsageError("in reproducible mode: what ranks learn by themselves depends on how many there are.")
            validate_optimizer("optimizer", optimizer)
            if isinstance(optimizer, ShardedOptimizer):
                raise checks.refuse("optimizer", optimizer, "a plain torch optimizer: every rank steps all parameters")
            if model.monitors.options.has_divided():
                raise UsageError(
                    "the model has a ShardedOptimizer, which steps with the mean of all ranks' gradients, and from now "
                    "on there would be none. Give its parameters to the plain optimizer."
                )
            own = {id(parameter) for parameter in model.parameters()}
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
            if strangers:
                raise ConfigurationError(
                    f"optimizer: its parameter of shape {list(strangers[0].shape)} is none of the model's, and would "
                    f"never be averaged."
                )
            if model.engine.stays_local:
                raise UsageError("the model has another LocalSGD. Close that first.")
            if model.engine.is_in_window:
                raise UsageError("gradients have been added and not averaged. Make it before the loop.")
            return {
                "every": checks.whole("every", every, least=1),
                "warmup_steps": checks.whole("warmup_steps", warmup_steps, least=0),
            }

        validate_on_all_ranks(model.world, "LocalSGD", validate)
        self.model = model
        self.optimizer = optimizer
        self.every = int(every)  # as plain numbers, whichever kind they are
        self.warmup_steps = int(warmup_steps)
        self.num_steps = 0
        self._usual_ending = model.engine.ending
        model.engine.ending = LocalWindowEnd(self)
        policy = model.settings.on_nonfinite
        self._policy = policy if policy in ("skip", "raise") or model.world.device.type == "cpu" else None
        self._finder = Finder()
        self._bad: dict[str, None] = {}  # parameters whose gradients weren't finite here since the last average
        self._num_left_out = 0
        self._has_warned = False
        self._scaler: torch.amp.GradScaler | None = None
        for observer in model.engine.observers:
            observer.set_apart(True)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Step on this rank's gradients. Collective if parameters are averaged now; returns whether they are equal.

        Args:
            scaler: The `torch.amp.GradScaler` by which losses were scaled: it steps the optimizer, and is updated.
                Ranks overflow each by itself; with parameters its scale becomes the same everywhere, the smallest.

        Raises:
            ConfigurationError: The scaler is none.
            UsageError: Gradients are scaled, and there is no scaler. Nothing was stepped.
            NonFiniteError: See the class. Parameters are each rank's own.
        """
        engine = self.model.engine
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            with abort_peers(self.model):
                raise checks.refuse("LocalSGD.step: scaler", scaler, "a torch.amp.GradScaler, or None")
        is_scaled = scaler is not None and scaler.is_enabled()
        if self._is_open:
            engine.end_local_window()
            if engine.was_scaled and not is_scaled and any(p.grad is not None for p in engine.parameters):
                raise UsageError(
                    "LocalSGD.step: the gradients were scaled by a GradScaler. Call local.step(scaler=scaler), in "
                    "place of scaler.step and scaler.update."
                )
            if not is_scaled:
                self._look_at_gradients()
        if is_scaled and scaler is not None:
            self._scaler = scaler
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.num_steps += 1
        if not self._is_open:
            return True
        engine.is_apart = True
        is_due = self.num_steps <= self.warmup_steps or (self.num_steps - self.warmup_steps) % self.every == 0
        if is_due:
            self.average()
        return is_due

    @property
    def _is_open(self) -> bool:
        """Whether ranks step on their own."""
        return self.model.engine.ending.owner is self

    @torch.no_grad()
    def average(self) -> None:
        """Collective: parameters and floating-point module buffers become their mean over ranks.

        Raises:
            NonFiniteError: See the class. Parameters are each rank's own.
        """
        world = self.model.world
        if world.world_size == 1:
            if self._bad:
                self._conclude()
            self.model.engine.is_apart = False
            return
        kept = [torch.view_as_real(each) if each.is_complex() else each for each in self.model._kept_tensors()]
        for number, tensors in enumerate(by_kind(each for each in kept if each.is_floating_point())):
            # One number more: whether this rank has found something. Not in a message of its own.
            has_flag = number == 0 and self._policy is not None
            flag = [tensors[0].new_tensor([float(bool(self._bad))])] if has_flag else []
            flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), *flag])
            self.model.engine.transport.all_reduce(flat, "mean").wait()
            if has_flag and bool(flat[-1] > 0):
                self._conclude()
            parts = torch.split_with_sizes(flat[: len(flat) - len(flag)], [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        if self._scaler is not None:
            self._agree_on_scale(self._scaler)
        self.model.engine.is_apart = False

    def _look_at_gradients(self) -> None:
        """Of this step; where it is to be left out, the optimizer finds none."""
        if self._policy is None or (self._policy == "warn" and (self._has_warned or self._bad)):
            return
        engine = self.model.engine
        self._finder.look_in_grads(engine.names, engine.parameters)
        found = self._finder.take()
        self._bad |= dict.fromkeys(found)
        if found and self._policy != "warn":
            self._num_left_out += 1
            drop_grads(engine.parameters)

    def _conclude(self) -> None:
        """Collective: say whose gradients were not finite."""
        world, policy = self.model.world, self._policy
        received = exchange(self.model.engine.control, {"names": list(self._bad), "left_out": self._num_left_out})
        self._bad, self._num_left_out = {}, 0
        num_left_out = sum(each["left_out"] for each in received)
        text = "; ".join(f"rank {rank}: {listed(each['names'])}" for rank, each in enumerate(received) if each["names"])
        message = f"a gradient was infinite or not a number since parameters were last averaged, on {text}."
        if policy == "raise":
            raise NonFiniteError(f"{message} That rank left out such steps; parameters were not averaged.")
        if self.model.monitors.nonfinite is not None:
            self.model.monitors.nonfinite.num_skipped += num_left_out
        if policy == "skip":
            end = f"Left out: {checks.counted(num_left_out, 'step')} of such ranks (in all {self.model.skipped_steps})."
        else:
            end = (
                "It is now in all ranks' parameters. This warning comes once; on_nonfinite='skip' leaves out such "
                "steps, 'raise' ends the run, None looks at nothing."
            )
        if world.is_main and not (policy == "warn" and self._has_warned):
            warn(f"{message} {end}")
        self._has_warned = True

    def _agree_on_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Collective: the smallest scale of all ranks, which have overflowed each by itself."""
        state = scaler.state_dict()
        received = exchange(self.model.engine.control, [state["scale"], state["_growth_tracker"]])
        scale, tracker = (min(each[i] for each in received) for i in range(2))
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})

    def close(self) -> None:
        """Collective: average once more; from now on backward passes exchange gradients again.

        What the optimizer keeps becomes the same on all ranks, too: the mean of tensors, rank 0's numbers. With momenta
        of their own ranks would step differently on equal gradients. Gradients that there are belong to this rank
        alone, and are dropped. Behind it `step` is the optimizer's.

        Raises:
            NonFiniteError: See the class. Ranks still step on their own.
        """
        world = self.model.world
        if not self._is_open:
            return
        self.average()
        self._leave()
        if world.world_size == 1:
            return
        try:
            make_equal(self.optimizer, self.model.engine)
        except ConfigurationError as error:  # on all ranks
            if world.is_main:
                warn(
                    f"LocalSGD.close: what the optimizer keeps is each rank's own, and can't be averaged: {error} "
                    f"To train on, make a new optimizer; with this one ranks would take different steps.",
                )

    def state_dict(self) -> dict[str, Any]:
        """How many steps have been made, and whether it is closed. Save where ranks have the same parameters."""
        return {"num_steps": self.num_steps, "is_closed": not self._is_open}

    def state_shards(self) -> tuple[dict[str, Any], list[Shard]]:
        """Collective: as `state_dict`, and all that the ranks' optimizers keep, which isn't the same.

        Returns:
            (equal on all ranks, this rank's pieces). `evenstep.Checkpointer` writes each rank's pieces; put together
            they are what `load_state_dict` takes.

        Raises:
            ConfigurationError: What ranks keep has different shapes. Raised on all of them.
        """
        state, shards = take_apart(self.optimizer, self.model.engine)
        return {**self.state_dict(), **state}, shards

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. What is a checkpoint's has the optimizer's state, too.

        On as many ranks as there were each has its own again; on others every rank has the mean of what all have kept.

        Args:
            state: What `state_dict` returned, or what a `Checkpointer` has put together of `state_shards`.

        Raises:
            ConfigurationError: It is no state of this class.
        """
        where = "LocalSGD.load_state_dict"
        if not isinstance(state, Mapping):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        num_steps = checks.whole(f"{where}: num_steps", state.get("num_steps"), least=0)
        if "ranks" in state:
            load_exactly(self.optimizer, put_together(state, self.model.world))
        self.num_steps = num_steps
        if self._is_open and state.get("is_closed", False):
            self._leave()

    def _leave(self) -> None:
        """Parameters are equal: backward passes exchange gradients again."""
        engine = self.model.engine
        engine.end_local_window()
        engine.ending = self._usual_ending
        if self.model.world.world_size > 1:
            drop_grads(engine.parameters)
        for observer in engine.observers:
            observer.set_apart(False)
