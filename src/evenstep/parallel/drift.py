"""Drift between the replicas of a divided model.

[Note: replicas of parts]

Ranks that differ only along "replicate" have the same parts of all parameters. Each such group compares its own: in a
small all-reduce of the group, in those windows in which something is due (see [Note: how ranks compare] in
`replica/monitors/drift`). The header, which is added over all ranks of the model, carries whether a group has found a
difference, so that all of them raise, and none waits for parameters of a rank that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenstep.device import Coming, arrived, start_copy
from evenstep.errors import DriftError
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part
from evenstep.parallel.layout import ranks_of
from evenstep.replica.channels import channel_of
from evenstep.replica.monitors.drift import DEFAULT_EVERY, DriftWatch
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.world import World

_LATE_EVERY = 16  # windows in which a GPU is asked whether a group has found something


class ReplicaDrift(DriftWatch):
    """Compares the parts that replicas of a divided model have alike; see [Note: replicas of parts].

    Args:
        names: Of the parameters.
        parameters: Those that are trained.
        replicas: The ranks that have the same parts as this one.
        owner: The model.
        control: Carries messages of all ranks of the model.
        compare_every: In how many windows all are compared once; None: the usual number.
    """

    num_numbers = 1

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        replicas: World,
        owner: object,
        control: Transport,
        compare_every: int | None,
    ) -> None:
        channel = channel_of(owner, replicas, "parts", replicas.device)
        super().__init__(
            names,
            parameters,
            replicas,
            channel,
            for_messages(channel, replicas.device),
            every=compare_every or DEFAULT_EVERY,
            is_vouched=compare_every is not None,
        )
        self.numbers = ranks_of(replicas)
        self._everybody = control
        self._num_headers = 0
        self._coming: Coming | None = None
        self._is_told = False

    def _values_of(self, parameter: int) -> Tensor:
        return local_part(self._parameters[parameter]).data

    def header_numbers(self) -> Sequence[float]:
        """See `Observer`: whether this rank's group has found a difference. Collective in the group, where it's due."""
        sums = super().header_numbers()
        if self._sent is not None:
            sums = torch.as_tensor(sums, dtype=torch.float64, device=self._device)
            self._transport.all_reduce(sums).wait()
        super().read_header(sums)
        return (float(self._found is not None),)

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """See `Observer`. On a GPU it is read a window later, and not in each."""
        self._num_headers += 1
        if not isinstance(sums, Tensor):
            self._is_told = sums[0] > 0
            return
        coming, self._coming = self._coming, None
        self._is_told = coming is not None and arrived(coming)[0] > 0
        if self._num_headers % _LATE_EVERY == 0:
            self._coming = start_copy(sums.clone())

    def raise_found(self) -> None:
        """See `Observer`: collective on all ranks of the model, where a group has found something."""
        if not self._is_told:
            return
        text, raised = "", None
        try:
            super().raise_found()
        except DriftError as error:
            text = str(error)
        except Exception as error:  # such as a warning that is an error here: the others wait all the same
            raised = error
        found = next(filter(None, exchange(self._everybody, text)), None)
        if found is not None:
            raise DriftError(found)
        if raised is not None:
            raise raised


def build_drift(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    world: World,
    owner: object,
    control: Transport,
    compare_every: int | None,
) -> ReplicaDrift | None:
    """Build the monitor of a divided model; None: it has no replicas, or nothing is to be compared.

    Collective: every rank of the model calls this.

    Args:
        names: As for `ReplicaDrift`, with all that follows.
        parameters: See there.
        world: All ranks, with a mesh.
        owner: See there.
        control: See there.
        compare_every: See there; 0: never.
    """
    mesh = world.mesh
    if mesh is None or "replicate" not in (mesh.mesh_dim_names or ()) or mesh["replicate"].size() == 1:
        return None
    # Parts that were offloaded to the host are not where the ranks' tensors travel.
    if compare_every == 0 or any(local_part(p).device.type != world.device.type for p in parameters):
        return None
    replicas = world.along("replicate")
    if not all(_is_alike(parameter, ranks_of(replicas)) for parameter in parameters):
        return None  # fully_shard over all ranks, whatever the mesh calls them: there are no replicas
    return ReplicaDrift(names, parameters, replicas, owner, control, compare_every)


def _is_alike(parameter: nn.Parameter, ranks: Sequence[int]) -> bool:
    """Whether ranks have the same part of a parameter: they don't differ along a mesh dimension that divides it."""
    if not is_dtensor(parameter):
        return True
    mesh, placements = parameter.device_mesh.mesh, parameter.placements
    places = [(mesh == rank).nonzero() for rank in ranks]
    inside = [place[0].tolist() for place in places if len(place)]
    dividing = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
    return len({tuple(place[index] for index in dividing) for place in inside}) <= 1
