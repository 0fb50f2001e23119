"""Less communication: ranks step on their own, and average their parameters now and then.

Local SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019). Not the same answer as averaging gradients:
between two averages replicas differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.optim.divided import DividedOptimizer
from evenstep.optim.kinds import validate_optimizer
from evenstep.replica.distributed import DistributedDataParallel
from evenstep.replica.weighting import drop_grads
from evenstep.transport.agreement import validate_together


class LocalUpdates:
    """Ranks step on their own gradients; every `every` steps parameters become the mean over ranks.

        local = evenstep.LocalUpdates(model, optimizer, every=8)
        for x, y in loader:
            model.backward(loss_of(model(x), y))
            local.step()
            optimizer.zero_grad()
        local.average()

    Collective: every rank makes it and calls `step` equally often, so give every rank equally many batches, none of
    them empty. From now on backward passes of the model don't exchange gradients, until `close`: `p.grad` is this
    rank's mean, which may be clipped. Weights of `model.backward` count within a rank; all ranks count the same in a
    mean. What the optimizer keeps (momenta) stays each rank's own. A `Checkpointer` counts and saves the steps behind
    which ranks have the same.

    Args:
        model: An `evenstep.DistributedDataParallel`.
        optimizer: A plain torch optimizer over its parameters.
        every: Steps from one average to the next.
        warmup_steps: Steps at the beginning after each of which parameters are averaged.

    Raises:
        ConfigurationError: No such model, a divided optimizer, one of other parameters, or a number out of its range.
        UsageError: Gradients have been added since they were last averaged, or ranks step on their own already.
        MismatchError: The ranks were given different numbers.
    """

    def __init__(
        self, model: DistributedDataParallel, optimizer: optim.Optimizer, *, every: int, warmup_steps: int = 0
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise checks.refuse("LocalUpdates: model", model, "an evenstep.DistributedDataParallel")

        def validate() -> dict[str, Any]:
            if model.world.lanes is not None:
                raise UsageError("in reproducible mode: what ranks learn by themselves depends on how many there are.")
            validate_optimizer("optimizer", optimizer)
            if isinstance(optimizer, DividedOptimizer):
                raise checks.refuse("optimizer", optimizer, "a plain torch optimizer: every rank steps all parameters")
            own = {id(parameter) for parameter in model.parameters()}
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
            if strangers:
                raise ConfigurationError(
                    f"optimizer: its parameter of shape {list(strangers[0].shape)} is none of the model's, and would "
                    f"never be averaged."
                )
            if model.engine.stays_local:
                raise UsageError("the model has another LocalUpdates. Close that first.")
            if model.engine.is_in_window:
                raise UsageError("gradients have been added and not averaged. Make it before the loop.")
            return {
                "every": checks.whole("every", every, least=1),
                "warmup_steps": checks.whole("warmup_steps", warmup_steps, least=0),
            }

        validate_together(model.world, "LocalUpdates", validate)
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.warmup_steps = warmup_steps
        self.num_steps = 0
        model.engine.stays_local = True
        if model.engine.drift is not None:
            model.engine.drift.doubt()  # momenta stay each rank's own, also behind the last average

    def step(self) -> bool:
        """Step on this rank's gradients. Collective if parameters are averaged now; returns whether they were."""
        self.model.engine.end_local_window()
        self.optimizer.step()
        self.num_steps += 1
        self.model.engine.is_apart = True
        is_due = self.num_steps <= self.warmup_steps or (self.num_steps - self.warmup_steps) % self.every == 0
        if is_due:
            self.average()
        return is_due

    @torch.no_grad()
    def average(self) -> None:
        """Collective: parameters and floating-point module buffers become their mean over ranks."""
        world = self.model.world
        self.model.engine.is_apart = False
        if world.world_size == 1:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self.model._kept_tensors():
            if tensor.is_floating_point():
                kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for tensors in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            world.transport.all_reduce(flat, "mean").wait()
            parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def close(self) -> None:
        """Collective: average once more; from now on backward passes exchange gradients again.

        Gradients that there are belong to this rank alone, and are dropped.
        """
        self.average()
        engine = self.model.engine
        if engine.stays_local:
            engine.end_local_window()
            engine.stays_local = False
            if self.model.world.world_size > 1:
                drop_grads(engine.parameters)

    def state_dict(self) -> dict[str, Any]:
        """How many steps have been made. Save parameters behind an average, where ranks have the same."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there.

        Raises:
            ConfigurationError: It is no state of this class.
        """
        where = "LocalUpdates.load_state_dict"
        if not isinstance(state, Mapping):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        self.num_steps = checks.whole(f"{where}: num_steps", state.get("num_steps"), least=0)
