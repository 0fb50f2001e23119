"""What is refused before anything connects, and how processes compare what they were given."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import Store
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.errors import ConfigurationError, EvenstepError, MismatchError, OtherRankFailedError
from evenstep.parameter_servers.embeddings.worker_tables import find_tables
from evenstep.parameter_servers.roles import Roles
from evenstep.replica.normalization.sync_batchnorm import SyncBatchNorm
from evenstep.replica.wrapper.model_check import check_same_model, describe

WHO = "evenstep.parameter_server: "


def validate_model(model: Any) -> nn.Module:
    """What `model_fn` has returned.

    Raises:
        ConfigurationError: It is no model, or none that workers can train by themselves.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{WHO}model_fn returned a {type(model).__name__}; return the model, a torch.nn.Module."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigurationError(
            f"{WHO}model_fn returned a {type(model).__name__}, which averages gradients itself. Return the plain model."
        )
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{WHO}the model has a SyncBatchNorm ({name or 'the model itself'}), which waits for all workers in "
                f"every forward pass. Use BatchNorm, whose statistics are each worker's own, or LayerNorm."
            )
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"{WHO}parameter {name!r} has no shape yet (a lazy module). Run the model once inside model_fn."
            )
    if not trained and not any(find_tables(model)):
        raise ConfigurationError(f"{WHO}the model has no parameter that requires a gradient.")
    return model


def make_optimizer(optimizer_fn: Callable[..., Any], parameters: Sequence[tuple[str, Tensor]]) -> Optimizer:
    """A server's optimizer.

    Args:
        optimizer_fn: The user's.
        parameters: The server's, with their names.

    Raises:
        ConfigurationError: It is none, needs all parameters at once, or has others than it was given.
    """
    optimizer = optimizer_fn(list(parameters))
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{WHO}optimizer_fn returned a {type(optimizer).__name__}; return a torch.optim.Optimizer of the "
            f"parameters that it is given, as in lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{WHO}{type(optimizer).__name__} evaluates the loss of all parameters again during its step; a server has "
            f"neither the loss nor the other servers' parameters. Use an optimizer whose step needs only gradients."
        )
    given = {id(parameter) for _, parameter in parameters}
    if any(id(parameter) not in given for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(
            f"{WHO}optimizer_fn returned an optimizer of other parameters than it was given. Pass it those of its "
            f"argument: lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    return optimizer


def make_scheduler(scheduler_fn: Callable[..., Any] | None, optimizer: Optimizer) -> LRScheduler | None:
    """A server's learning-rate schedule; None: there is none.

    Raises:
        ConfigurationError: It is none, of another optimizer, or needs more than the number of updates.
    """
    if scheduler_fn is None:
        return None
    scheduler = scheduler_fn(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"{WHO}scheduler_fn returned a {type(scheduler).__name__}; return a schedule of the optimizer that it is "
            f"given, as in lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            f"{WHO}ReduceLROnPlateau needs a metric at each step, which servers don't have. Use a schedule of the "
            f"number of updates."
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigurationError(f"{WHO}scheduler_fn returned a schedule of another optimizer than it was given.")
    return scheduler


def compare(
    store: Store, roles: Roles, facts: Mapping[str, Any], model: nn.Module | None, error: Exception | None
) -> None:
    """Check that all processes have the same model and arguments, and that none has failed so far.

    Collective.

    Args:
        store: Of this run.
        roles: Whose this process is.
        facts: The arguments that must be equal.
        model: None if there was an error.
        error: What this process has failed with.

    Raises:
        ConfigurationError: A process was given what can't be meant, or other arguments. On all of them.
        MismatchError: The models differ. On all of them.
        OtherRankFailedError: The user's functions failed on another process.
        Exception: What was passed as `error`.
    """
    mine: dict[str, Any] = {"facts": dict(facts)}
    if error is not None:
        is_mistake = isinstance(error, EvenstepError) and error.is_users_mistake
        text = str(error) if is_mistake else f"{type(error).__name__}: {error}"
        mine["error"] = {"text": text, "is_mistake": is_mistake}
    elif model is not None:
        mine["parameter"] = describe(model.named_parameters())
        mine["module buffer"] = describe(model.named_buffers())
    store.set(f"given-{roles.rank}", json.dumps(mine))
    everybody = [json.loads(store.get(f"given-{rank}")) for rank in range(roles.num_workers + roles.num_servers)]
    if error is not None:
        raise error
    for rank, each in enumerate(everybody):
        if (failed := each.get("error")) is not None:
            if failed["is_mistake"]:
                raise ConfigurationError(failed["text"])
            raise OtherRankFailedError(f"{WHO}{roles.name_of(rank)} (rank {rank}) failed: {failed['text']}")
    first = everybody[0]["facts"]
    for rank, each in enumerate(everybody):
        for name, value in first.items():
            if each["facts"][name] != value:
                raise ConfigurationError(
                    f"{WHO}{name}={value!r} on rank 0, but {each['facts'][name]!r} on rank {rank} "
                    f"({roles.name_of(rank)}). All workers and servers pass the same."
                )
    for kind in ("parameter", "module buffer"):
        finding = check_same_model([[tuple(entry) for entry in each[kind]] for each in everybody], kind)
        if finding is not None:
            raise MismatchError(
                f"{WHO}model_fn did not make the same model everywhere ({roles.num_workers} workers, then "
                f"{roles.num_servers} servers, by rank): {finding}"
            )
