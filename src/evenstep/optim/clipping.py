"""Clipping of whole gradients, and of gradients that are divided over ranks.

The rule is that of torch's `clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural
networks", 2013). Norms are added in float64 for all dtypes of gradients; in reproducible mode in fixed point, so that
the order doesn't matter (`exact.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, MismatchError, NonFiniteError, UsageError
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part
from evenstep.ground.computing.device import by_kind
from evenstep.optim import exact
from evenstep.optim.consistency import Given, abort_peers, model_of, note, parameters_of
from evenstep.replica.gradients.buckets.bucket import HALF_PRECISION
from evenstep.replica.sharded.gradient_placeholder import GradientPlaceholder, local_parts
from evenstep.replica.wrapper.distributed import wrapped_models
from evenstep.transport.base import Op
from evenstep.transport.core.transport import Transport

_OPS = {False: dist.ReduceOp.SUM, True: dist.ReduceOp.MAX}

Parameters = optim.Optimizer | nn.Module | Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`. On every rank this is the norm of the whole gradient.

    Collective if gradients are divided over ranks (a `ShardedOptimizer`, FSDP2, tensor parallelism, the stages of a
    pipeline): every rank calls this, with the same parameters. One pass reads the gradients, a second scales them;
    nothing waits for a GPU. With a `GradScaler`, call `scaler.unscale_` first.

    All ranks pass the same arguments. For divided gradients on CPUs the exchange for the norm compares the arguments;
    otherwise the end of the next backward pass does. With an infinite `max_norm` this only computes the norm: if
    gradients are whole, one rank may then call it alone.

    Args:
        parameters: An optimizer, a module, or parameters.
        max_norm: The largest norm that stays as it is.
        norm_type: Exponent of the norm, greater than 0; `math.inf` or "inf" for the largest absolute value.
        error_if_nonfinite: Raise if the norm is infinite or NaN (on a GPU this waits for the device).

    Returns:
        The norm before clipping: 0-dim, float64.

    Raises:
        ConfigurationError: A norm or an exponent is invalid.
        MismatchError: The ranks were given different arguments; gradients are unchanged.
        UsageError: The gradients have not been averaged over ranks yet.
        NonFiniteError: See `error_if_nonfinite`; gradients are unchanged.
    """
    who = "clip_grad_norm_"
    parameters = list(parameters) if isinstance(parameters, Iterator) else parameters
    with abort_peers(parameters):
        checks.switch(f"{who}: error_if_nonfinite", error_if_nonfinite)
        chosen = _listed(parameters, who)
        _validate_averaged(chosen, who)
    exponent, received, problem = 2.0, None, None
    try:
        exponent = _exponent(norm_type)
        received = _limit(max_norm)
    except ConfigurationError as error:
        problem = error
    facts = (
        ("max_norm", received),
        ("norm_type", exponent),
        ("error_if_nonfinite", bool(error_if_nonfinite)),
        ("the number of parameters", len(chosen)),
    )
    only_measures = received == math.inf
    gradients = _Gradients(chosen)
    norm = _norm(gradients, exponent, chosen, Given(who, facts, problem, changes=not only_measures))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteError(
            f"clip_grad_norm_: the gradient's norm is {norm.item()}. To clip anyway, leave error_if_nonfinite out."
        )
    if only_measures:
        return norm  # torch's scale would be inf / inf if a gradient is infinite
    if received is not None:
        scale = torch.clamp(received / (norm + 1e-6), max=1.0)
    else:
        assert isinstance(max_norm, Tensor), "only a tensor on a GPU isn't read"
        limit = max_norm.reshape(())
        scale = torch.where(torch.isposinf(limit), 1.0, torch.clamp(limit / (norm + 1e-6), max=1.0))
    if scale.device.type == "cpu" and scale.numpy() == 1:
        return (
            norm  # in most steps: saves reading and writing all gradients. On a GPU this test would wait for the device
        )
    for same in by_kind(gradients.local):
        torch._foreach_mul_(same, scale.to(same[0].device))
    return norm


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limit every element of the gradients to [-clip_value, clip_value], divided over ranks or not.

    All ranks pass the same arguments; the end of the next backward pass compares them.

    Args:
        parameters: An optimizer, a module, or parameters.
        clip_value: The largest absolute value, at least 0.

    Raises:
        ConfigurationError: The value is invalid.
        UsageError: The gradients have not been averaged over ranks yet.
    """
    who = "clip_grad_value_"
    parameters = list(parameters) if isinstance(parameters, Iterator) else parameters
    with abort_peers(parameters):
        clip_value = checks.number(f"{who}: clip_value", clip_value, least=0, finite=False)
        chosen = _listed(parameters, who)
        _validate_averaged(chosen, who)
    note(model_of(chosen), who, [("clip_value", clip_value), ("the number of parameters", len(chosen))])
    for same in by_kind(_Gradients(chosen).local):
        torch._foreach_clamp_min_(same, -clip_value)
        torch._foreach_clamp_max_(same, clip_value)


class _Gradients:
    """This rank's gradients of some parameters.

    Attributes:
        hidden: Placeholders of gradients that a ShardedOptimizer has sharded.
        parts: This rank's shards of the hidden gradients.
        whole: Gradients that every rank has in full.
        divided: Gradients of parameters that FSDP2 or tensor parallelism has divided (DTensor).
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.hidden: list[GradientPlaceholder] = []
        self.whole: list[Tensor] = []
        self.divided: list[Any] = []
        for parameter in parameters:
            grad = parameter.grad
            if isinstance(grad, GradientPlaceholder):
                self.hidden.append(grad)
            elif grad is not None and grad.is_sparse:
                parameter.grad = grad = grad.coalesce()
                self.whole.append(grad._values())
            elif grad is not None and is_dtensor(grad):
                self.divided.append(_added(parameter))
            elif grad is not None:
                self.whole.append(grad)
        self.parts = local_parts(self.hidden)

    @property
    def local(self) -> list[Tensor]:
        """This rank's parts of all gradients, as writable tensors."""
        return [*self.parts, *self.whole, *map(local_part, self.divided)]


def _norm(gradients: _Gradients, norm_type: float, parameters: Sequence[Tensor], given: Given) -> Tensor:
    """The norm of the whole gradient, the same on all ranks: 0-dim, float64.

    Args:
        gradients: The gradients.
        norm_type: Exponent of the norm.
        parameters: The gradients' parameters.
        given: This rank's arguments and their error, if any; ranks compare them.
    """
    tensors = [*gradients.hidden, *gradients.whole, *gradients.divided]
    device = tensors[0].device if tensors else torch.device("cpu")
    # Each gradient is divided over the ranks of its own model, so several models need several sums.
    transports: dict[int, tuple[Transport, list[GradientPlaceholder]]] = {}
    for hidden in gradients.hidden:
        transport = hidden.bucket.transport
        transports.setdefault(id(transport), (transport, []))[1].append(hidden)
    parts = [(transport, local_parts(theirs)) for transport, theirs in transports.values()]
    if not any(transport.world_size > 1 and _carries_facts(device) for transport, _ in parts):
        _record_arguments(parameters, given)
    is_max = math.isinf(norm_type)
    if (world := worlds.initialised()) is not None and world.virtual_ranks is not None and not is_max:
        return _exact_norm(gradients.whole, parts, norm_type, device, given)
    total = _powers(gradients.whole, norm_type, device)
    for transport, own in parts:
        of_model = _over_ranks(transport, _powers(own, norm_type, device), given, is_max=is_max)
        total = torch.maximum(total, of_model) if is_max else total + of_model
    if gradients.divided:
        of_meshes = _over_meshes(gradients.divided, norm_type, device)
        total = torch.maximum(total, of_meshes) if is_max else total + of_meshes
    stages = None if world is None or world.mesh is None else world.mesh
    if stages is not None and "pipeline" in (stages.mesh_dim_names or ()) and stages["pipeline"].size() > 1:
        dist.all_reduce(total, _OPS[is_max], group=stages.get_group("pipeline"))  # each stage has different layers
    return total if is_max else total.pow(1 / norm_type)


def _exact_norm(
    whole: Sequence[Tensor],
    divided: Sequence[tuple[Transport, Sequence[Tensor]]],
    norm_type: float,
    device: torch.device,
    given: Given,
) -> Tensor:
    """Like `_norm`, with the same bits for every division of gradients over ranks: 0-dim, float64."""
    peak = exact.largest(whole, device)
    for transport, own in divided:
        peak = torch.maximum(peak, _over_ranks(transport, exact.largest(own, device), given, is_max=True))
    words = exact.words_of(whole, peak, norm_type)
    for transport, own in divided:
        of_model = exact.words_of(own, peak, norm_type)
        transport.all_reduce(of_model).wait()
        words += of_model
    return exact.value_of(words, peak, norm_type).pow(1 / norm_type)


def _over_meshes(gradients: Sequence[Any], norm_type: float, device: torch.device) -> Tensor:
    """The sum of powers of gradients that are divided over meshes, over the ranks that have parts: 0-dim, float64.

    Collective. Gradients that are divided over the same groups are added together, also from different meshes.

    Args:
        gradients: DTensors.
        norm_type: Exponent of the norm.
        device: The result's device.
    """
    is_max = math.isinf(norm_type)
    kinds: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in gradients:
        dims = [dim for dim, each in enumerate(grad.placements) if not each.is_replicate()]
        kind = tuple(grad.device_mesh.get_group(dim) for dim in dims if grad.device_mesh.size(dim) > 1)
        kinds.setdefault(kind, []).append(local_part(grad))
    powers = {kind: _powers(theirs, norm_type, device) for kind, theirs in kinds.items()}
    for process_group in dict.fromkeys(each for kind in kinds for each in kind):
        concerned = [kind for kind in kinds if process_group in kind]
        together = torch.stack([powers[kind] for kind in concerned])
        dist.all_reduce(together, _OPS[is_max], group=process_group)
        powers |= zip(concerned, together.unbind(), strict=True)
    stacked = torch.stack(list(powers.values()))
    return stacked.amax() if is_max else stacked.sum()


def _added(parameter: Any) -> Any:
    """The gradient of a DTensor. If tensor parallelism has left it partial, it is first added over ranks."""
    if any(each.is_partial() for each in parameter.grad.placements):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


def _carries_facts(device: torch.device) -> bool:
    """Whether an exchange may also carry argument checksums. Reading them on a GPU would wait for the device."""
    return device.type == "cpu"


def _record_arguments(parameters: Sequence[Tensor], given: Given) -> None:
    """Record the arguments for comparison in the next backward pass; if they are wrong, raise, and end the peers' wait.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if given.problem is not None:
        with abort_peers(parameters):
            raise given.problem
    if given.changes:
        note(model_of(parameters), given.who, given.facts)


def _over_ranks(transport: Transport, own: Tensor, given: Given, *, is_max: bool) -> Tensor:
    """The sum or the maximum over the ranks, 0-dim. On CPUs the same collective compares the ranks' arguments.

    Raises:
        ConfigurationError: An argument is wrong on some rank.
        MismatchError: The ranks' arguments differ.
    """
    op: Op = "max" if is_max else "sum"
    if transport.world_size == 1 or not _carries_facts(own.device):
        transport.all_reduce(own, op).wait()
        return own
    both = torch.cat([own.reshape(1), given.numbers(transport.rank, transport.world_size, is_max=is_max)])
    try:
        transport.all_reduce(both, op).wait()
    except MismatchError as error:
        values = ", ".join(f"{name}={value!r}" for name, value in given.facts)
        raise MismatchError(f"{error} On rank {transport.rank} {given.who} was given {values}.") from None
    given.judge(transport, both[1:].tolist())
    return both[0]


def _powers(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |x| ** norm_type over all elements, or the largest |x|: 0-dim, float64."""
    norms: list[Tensor] = []
    for same in by_kind(tensors):
        # A norm in 16 bits would overflow, or have only three digits.
        wide = torch.float32 if same[0].dtype in HALF_PRECISION else None
        norms += torch._foreach_norm(same, norm_type, wide)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([norm.to(device, torch.float64) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _exponent(norm_type: Any) -> float:
    norm_type = math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type  # as torch accepts it
    exponent = checks.number("clip_grad_norm_: norm_type", norm_type, above=0, finite=False)
    world = worlds.initialised()
    if world is not None and world.virtual_ranks is not None and exponent not in (1.0, 2.0, math.inf):
        raise ConfigurationError(
            f"clip_grad_norm_: norm_type={norm_type} in reproducible mode, which supports only the exponents 1, 2 and "
            f"math.inf."
        )
    return exponent


def _limit(max_norm: Any) -> float | None:
    """The value of `max_norm` that ranks compare; None for a tensor on a GPU, which isn't read."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and max_norm.device.type != "cpu":
        return None
    return checks.number("clip_grad_norm_: max_norm", max_norm, least=0, finite=False)


def _listed(parameters: Parameters, who: str) -> list[Tensor]:
    found = parameters_of(parameters)
    if found is not None:
        return found
    if not isinstance(parameters, Iterable):
        raise checks.refuse(f"{who}: parameters", parameters, "an optimizer, a module, or parameters")
    wrong = next(each for each in parameters if not isinstance(each, Tensor))
    raise checks.refuse(f"{who}: one of the parameters", wrong, "a tensor (of named_parameters() pass only the values)")


def _validate_averaged(parameters: Sequence[Tensor], what: str) -> None:
    models = [each for each in wrapped_models() if each.engine.is_in_window and each.world.world_size > 1]
    if not models:
        return
    given = set(map(id, parameters))
    model = next((each for each in models if any(id(p) in given for p in each.engine.parameters)), None)
    if model is not None:
        raise UsageError(
            f"{what} on rank {model.world.rank}: gradients have been added on this rank since they were last averaged "
            f"over ranks, so their norm would be this rank's alone. Clip after the backward pass that ends the window."
        )
