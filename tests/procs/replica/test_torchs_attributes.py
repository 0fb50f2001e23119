"""What a program can read of torch's wrapped model, it can read of ours, but for a list with reasons."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from evenstep.errors import UsageError
from evenstep.replica.gradients.window import State
from tests.ranks import on_ranks

# Attributes that ours lacks: why.
LEFT_OUT = {
    "_accum_grad_hooks": "of compiled autograd's own reducer",
    "_bucket_config": "torch's own form of what `bucket_bytes_cap` and `bucket_bytes_cap_list` say",
    "_comm_hooks": "torch's own list for compiled autograd; the hook's name is in the logging data",
    "_ddp_sink_clone": "there is no sink: outputs pass through no node",
    "_delay_all_reduce_all_params": "nothing is delayed",
    "_delay_all_reduce_params": "nothing is delayed",
    "_delay_grad_buffer": "nothing is delayed",
    "_delay_grad_views": "nothing is delayed",
    "_require_manual_backward_finalization": "nothing is left to finalize when a backward pass returns",
    "_lazy_init_ran": "nothing is set up late",
    "_lazy_init_module": "nothing is set up late",
    "_static_graph_delay_allreduce_enqueued": "of torch's reducer; nothing is assumed of the graph",
    "_use_python_reducer": "of compiled autograd's own reducer",
}

# Entries of the logging data that programs read: torch's own test programs, for one.
LOGGED = {"comm_hook", "join_uneven_inputs", "has_rebuilt_buckets", "has_sync_bn"}


def both(**options):
    evenstep.init(quiet=True)
    models = []
    for wrap in (TorchDistributedDataParallel, evenstep.DistributedDataParallel):
        model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), **options)
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
        models.append(model)
    return models


@pytest.mark.extended
@on_ranks(2)
def test_every_attribute_of_torchs_can_be_read_or_is_listed(world):
    for options in ({}, {"static_graph": True}, {"device_mesh": init_device_mesh("cpu", (2,))}):
        torchs, ours = both(**options)
        assert {name for name in vars(torchs) if not hasattr(ours, name)} <= LEFT_OUT.keys(), options
        assert not [name for name in LEFT_OUT if hasattr(ours, name)]
        for name in ("dim", "device", "device_type", "device_ids", "output_device", "static_graph", "bucket_bytes_cap"):
            assert getattr(ours, name) == getattr(torchs, name), name
        assert hasattr(ours, "device_mesh") is ("device_mesh" in options)


@pytest.mark.extended
@on_ranks(2)
def test_the_entries_of_the_logging_data_that_programs_read_are_there(world):
    models = both(static_graph=True)
    for model in models:
        with model.join():
            model(torch.ones(2, 3)).sum().backward()
    torchs, ours = (model._get_ddp_logging_data() for model in models)
    assert ours.keys() == LOGGED - {"comm_hook"}
    assert ours["join_uneven_inputs"] == torchs["join_uneven_inputs"] == 1
    assert ours["has_sync_bn"] == torchs["has_sync_bn"] == 0
    models[1].register_comm_hook(None, allreduce_hook)
    assert models[1]._get_ddp_logging_data()["comm_hook"] == allreduce_hook.__qualname__


@pytest.mark.extended
@on_ranks(2)
def test_what_steers_torchs_reducer_prepares_a_pass(world):
    _, ours = both()
    assert ours.engine.state is State.IDLE
    ours.reducer.prepare_for_forward()
    assert ours.reducer._rebuild_buckets() is False
    ours.reducer.prepare_for_backward([])
    assert ours.engine.state is State.FORWARD
    ours.zero_grad()
    rank = ours.world.rank
    (ours.module(torch.randn(2, 3)).sum() + rank * ours.module[1].bias.sum()).backward()
    torch.testing.assert_close(ours.module[1].bias.grad, torch.full((4,), 2.5))  # the mean over both ranks
    assert ours.engine.state is State.IDLE
    assert not hasattr(ours.reducer, "_get_local_used_map")
    with pytest.raises(AttributeError, match="torch's reducer isn't set up"):
        ours._set_sparse_metadata({})
    with pytest.raises(UsageError, match="broadcast_buffers=False"):
        ours._register_buffer_comm_hook(None, None)
    ours._check_reducer_finalized()
