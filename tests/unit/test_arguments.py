"""Every public name, given what can't be meant, says what and what would be right, in an error of ours."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import evenstep
from evenstep.cli import main
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.health import excepthook

NAN, INF = float("nan"), float("inf")
WORLD = evenstep.World.alone(device="cpu")


def wrapped(**arguments):
    return evenstep.DistributedDataParallel(nn.Linear(2, 1), **{"world": WORLD, **arguments})


def sgd(model=None):
    return torch.optim.SGD((model or nn.Linear(2, 1)).parameters(), lr=0.1)


def loader(dataset=range(8), **arguments):
    return evenstep.DataLoader(dataset, **{"global_batch_size": 4, "world": WORLD, **arguments})


def checkpointer(directory="runs", **arguments):
    return evenstep.Checkpointer(directory, **{"world": WORLD, "model": nn.Linear(1, 1), **arguments})


def sharded(*positional, kind=torch.optim.SGD, **arguments):
    return evenstep.ShardedOptimizer(wrapped(), kind, *positional, **{"lr": 0.1, **arguments})


def local(**arguments):
    model = wrapped()
    return evenstep.LocalSGD(model, **{"optimizer": sgd(model), "every": 2, **arguments})


def average(**arguments):
    return evenstep.ExponentialMovingAverage(**{"model": nn.Linear(1, 1), **arguments})


def rates(**arguments):
    given = {"optimizer": sgd(), "base_batch_size": 1, "global_batch_size": 2, "world": WORLD}
    return evenstep.scale_learning_rate(**{**given, **arguments})


def with_grad():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return [parameter]


def backward(**arguments):
    model = wrapped()
    model.backward(**{"loss": model(torch.ones(1, 2)).sum(), **arguments})


def each(call, name, *values, words=""):
    """Cases of one argument: the message has its name and what is wanted."""
    return [pytest.param(call, {name: value}, words or f"{name}=", id=f"{call.__name__}-{name}-{i}")
            for i, value in enumerate(values)]  # fmt: skip


def clip_norm(**arguments):
    return evenstep.clip_grad_norm_(**{"parameters": with_grad(), "max_norm": 1.0, **arguments})


def clip_value(**arguments):
    return evenstep.clip_grad_value_(**{"parameters": with_grad(), "clip_value": 1.0, **arguments})


def norm(**arguments):
    return evenstep.SyncBatchNorm(**{"num_features": 3, **arguments})


def convert(**arguments):
    return evenstep.SyncBatchNorm.convert_sync_batchnorm(**{"module": nn.Linear(1, 1), **arguments})


def progress(**arguments):
    return WORLD.progress(**{"items": [1], **arguments})


def tokens(**arguments):
    return evenstep.TokenDataset(**{"tokens": torch.arange(9), "context": 2, **arguments})


def sampler(**arguments):
    return evenstep.DistributedSampler(**{"dataset": range(4), "num_replicas": 1, "rank": 0, **arguments})


def parallel(**arguments):
    return evenstep.DataParallel(**{"module": nn.Linear(1, 1), "device_ids": ["cpu"], **arguments})


def launch(**arguments):
    return evenstep.launch(**{"fn": print, "nproc": 1, **arguments})


NO_SWITCH = ("yes", None, 2, NAN)
CASES = [
    # a world
    *itertools.chain(*(each(call, "world", 5, "x") for call in (wrapped, loader, checkpointer, rates))),
    *each(evenstep.World.alone, "device", "x", [], "mps", words="device="),
    *each(evenstep.World.alone, "seed", "x", -1, 1.5, True),
    *each(evenstep.init, "timeout_s", "x", 0, NAN, INF, None),
    *each(evenstep.init, "seed", "x", -1, 2**63),
    *each(evenstep.init, "transport", 5, [], "tcp"),
    *each(evenstep.init, "quiet", "x"),
    *each(evenstep.World.from_process_group, "group", 5, words="group=5"),
    *each(WORLD.at_end, "callback", 5, None),
    *each(WORLD.request_stop, "reason", 5, ""),
    *each(progress, "items", 5, None),
    *each(progress, "total", "x", -1, 1.5),
    *each(progress, "interval_s", -1, "x", NAN),
    *each(progress, "description", 5),
    # replication
    *each(wrapped, "dim", "x", None, 0.5),
    *each(wrapped, "bucket_cap_mb_list", [], 5, "1", [NAN], ["1"], words="bucket_cap_mb_list"),
    *each(wrapped, "bucket_cap_mb", "x", 0, NAN, INF),
    *each(wrapped, "reduce_dtype", "x", torch.int32, torch.float8_e5m2),
    *each(wrapped, "broadcast_buffers", "no", 5),
    *each(wrapped, "forward_sync_buffers", "no", 5),
    *each(wrapped, "init_sync", *NO_SWITCH),
    *each(wrapped, "static_graph", "x"),
    *each(wrapped, "device_ids", 5, "0", ["x"], words="device_ids"),
    *each(wrapped, "device_mesh", 5),
    *each(wrapped, "mixed_precision", 5),
    *each(wrapped, "delay_all_reduce_named_params", 5, words="delay_all_reduce"),
    *each(backward, "loss", torch.ones(()), words="the loss has no gradient"),
    *each(backward, "scaler", 5),
    *each(parallel, "device_ids", 5, "cpu"),
    *each(parallel, "device_ids", [None], words="None isn't a device"),
    *each(parallel, "dim", "x", None),
    *each(norm, "num_features", 0, -1, "x", None),
    *each(norm, "eps", -1, NAN, "x"),
    *each(norm, "momentum", -1, 2, "x"),
    *each(norm, "affine", "x"),
    *each(norm, "process_group", 5),
    *each(convert, "module", 5, None),
    *each(convert, "process_group", 5),
    # data
    *each(loader, "shuffle", "yes", 2),
    *each(loader, "collate_fn", 3),
    *each(loader, "worker_init_fn", 3),
    *each(loader, "prefetch_factor", 0, "x", -1),
    *each(loader, "timeout", -1, "x", NAN),
    *each(loader, "drop_last", *NO_SWITCH),
    *each(loader, "sample_seed", *(wrong for wrong in NO_SWITCH if wrong is not None)),
    *each(loader, "pin_memory", "x"),
    *each(loader, "dataset", None, words="there is nothing to load"),
    *each(loader, "resume_streams", 5, "exact", None, "state"),
    *each(tokens, "header_bytes", -1, "x", None),
    *each(tokens, "tokens", None, object()),
    *each(tokens, "context", 0, "x"),
    *each(tokens, "dtype", "x", torch.float32),
    *each(tokens, "padding", "x", 1.5),
    *each(tokens, "documents", "x"),
    *each(sampler, "seed", "x", None),
    *each(sampler, "shuffle", "x"),
    *each(sampler, "pad", "x"),
    *each(sampler().set_epoch, "epoch", -1, "x"),
    *each(sampler().load_state_dict, "state", 5, None),
    # checkpoints
    *each(checkpointer, "directory", 5, None, "", b"x"),
    *each(checkpointer, "asynchronous", "x"),
    *each(checkpointer, "every_steps", 0, "x", True),
    *each(checkpointer, "every_minutes", 0, "x", NAN),
    *each(checkpointer, "keep", 0, None),
    *each(checkpointer, "best", 5, ""),
    *each(checkpointer, "best_is", "smallest", None),
    # the step
    *each(sharded, "kind", 5, None, nn.Linear),
    *each(sharded, "params", 5, "x", torch.ones(2)),
    *each(sharded, "params", [], [None], words="^ShardedOptimizer: SGD: "),
    *each(sharded, "lr", -1, "x", words="^ShardedOptimizer: SGD: "),
    *each(sharded, "lrr", 1, words="unexpected keyword argument 'lrr'"),
    *each(sharded, "shard_gradients", *NO_SWITCH),
    *each(sharded, "elementwise", "x"),
    *each(sharded, "reduce_dtype", "x", torch.int32),
    *each(local, "every", 0, "x"),
    *each(local, "warmup_steps", -1, None),
    *each(local, "optimizer", 5),
    *each(average, "model", 5),
    *each(average, "decay", 1, -0.1, "x", NAN),
    *each(average().load_state_dict, "state", 5, None),
    *each(rates, "optimizer", 5),
    *each(rates, "base_batch_size", 0, "x"),
    *each(rates, "rule", "cubic", []),
    *each(clip_norm, "max_norm", -1, NAN, "x", None, "1", [1.0]),
    *each(clip_norm, "norm_type", 0, "x", NAN),
    *each(clip_norm, "error_if_nonfinite", "x"),
    *each(clip_norm, "parameters", 5, None),
    *each(clip_norm, "parameters", [("weight", torch.ones(1))], words="one of the parameters="),
    *each(clip_value, "clip_value", -1, NAN, "x", None),
    # ranks from a function
    *each(launch, "nproc", 0, "x", True),
    *each(launch, "threads_per_rank", 0, "x"),
    *each(launch, "timeout_s", 0, "x", NAN),
    *each(launch, "kwargs", 5, {1: 2}),
]


@pytest.mark.parametrize(("call", "arguments", "words"), CASES)
def test_what_cannot_be_meant_is_refused(call, arguments, words):
    with pytest.raises(ConfigurationError, match=words) as raised:
        call(**arguments)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


CALLED_OFTEN = {"backward", "clip_grad_norm_", "clip_grad_value_"}  # python's own error has to do
WITH_NAMES_OF_THEIR_OWN = {"Checkpointer", "ShardedOptimizer", "SyncBatchNorm"}
CALLED = sorted(set(evenstep.__all__) - CALLED_OFTEN - {"EvenstepError", "World"})


@pytest.mark.parametrize("name", sorted(set(CALLED) - WITH_NAMES_OF_THEIR_OWN))
def test_an_argument_that_there_is_not_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"^evenstep\.{name}: there is no argument nonsense\. There are \w+"):
        getattr(evenstep, name)(nonsense=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: evenstep.init(5),
            "init: arguments without a name: none. Write the names of the others: seed, device,",
        ),
        (lambda: evenstep.init(sed=0), "init: there is no argument sed. Did you mean seed?"),
        (
            lambda: evenstep.Checkpointer("a", 1, 2),
            r"Checkpointer: arguments without a name: directory. .* \*\*objects\.",
        ),
        (lambda: evenstep.Checkpointer(), "Checkpointer: missing 1 required positional argument: 'directory'"),
        (
            lambda: evenstep.World.alone("cpu"),
            "World.alone: arguments without a name: none. Write the names of the others: ",
        ),
        (lambda: evenstep.ShardedOptimizer(), "ShardedOptimizer: missing 2 required positional arguments"),
        (
            lambda: evenstep.DataLoader(range(4), 2, batchsize=3),
            "DataLoader: there is no argument batchsize. Did you mean",
        ),
    ],
)
def test_arguments_of_another_call_are_one_error(call, words):
    with pytest.raises(ConfigurationError, match=f"^evenstep.{words}") as raised:
        call()
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


@excepthook.for_users
def broken(number):
    return len(number, number)


def test_a_type_error_inside_stays_what_it_is():
    """Only the call itself is judged."""
    with pytest.raises(TypeError, match="len") as raised:
        broken(1)
    assert not isinstance(raised.value, ConfigurationError)
    with pytest.raises(ConfigurationError, match=r"^evenstep.broken: missing 1 required positional argument: 'number'"):
        broken()


def test_a_closed_world_is_refused():
    world = evenstep.World.alone(device="cpu")
    world.close()
    with pytest.raises(UsageError, match="DataLoader: <World rank 0/1 on cpu over local closed> was given"):
        evenstep.DataLoader(range(4), 2, world=world)


def test_what_is_right_stays_right():
    """Numbers and switches of numpy, a header of nothing, infinite limits."""
    numpy = pytest.importorskip("numpy")
    assert len(loader(shuffle=numpy.bool_(True), drop_last=0)) == 2
    assert float(clip_norm(max_norm=INF)) == pytest.approx(3**0.5)
    assert norm(momentum=None, eps=0).momentum is None
    assert list(progress(total=None, interval_s=INF, items=iter([1, 2]))) == [1, 2]
    assert tokens(context=numpy.int64(2)).context == 2


def test_discard_load_and_resume_look_at_their_arguments(tmp_path):
    checkpoint = checkpointer(tmp_path)
    for after in (-1, "x", None):
        with pytest.raises(ConfigurationError, match=r"^Checkpointer.discard: after="):
            checkpoint.discard(after=after)
    with pytest.raises(ConfigurationError, match=r"^Checkpointer.load: step='x'"):
        checkpoint.load("x")
    with pytest.raises(ConfigurationError, match=r"^Checkpointer.resume: strict='no'"):
        checkpoint.resume(strict="no")
    for value in (torch.ones(2), None, "0.5"):
        with pytest.raises(ConfigurationError, match=r"metric loss=.* isn't a number"):
            checkpoint.step(loss=value)
    checkpoint.close()


def test_a_metric_that_never_comes_is_told_at_the_first_save_and_an_error_at_the_end(tmp_path, capsys):
    checkpoint = checkpointer(tmp_path, best="val_loss", every_steps=2)
    for _ in range(3):
        checkpoint.step(loss=1.0)
    assert capsys.readouterr().err.count("best='val_loss': no step or save has given this metric yet") == 1
    with pytest.raises(UsageError, match=r"best='val_loss', but .* \(given: loss\)"):
        checkpoint.close()
    again = checkpointer(tmp_path, best="val_loss", every_steps=2)
    assert again.resume() == 3, "everything was saved"
    again.step()
    again.step(val_loss=2.0)
    again.close()
    assert checkpointer(tmp_path / "short", best="val_loss").close() is None, "nothing was saved, so nothing was lost"


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("run --stopped-grace -1 x.py", 78, "--stopped-grace=-1.0"),
        ("run --max-restarts -1 x.py", 78, "--max-restarts=-1"),
        ("run --master-port 70000 x.py", 78, "--master-port=70000"),
        (f"checkpoint list {'a' * 300}", 74, "File name too long"),
        ("checkpoint list nowhere", 74, "nowhere has no checkpoint"),
        ("checkpoint import x.py run", 74, "isn't a file of only tensors and plain data"),
    ],
)
def test_a_command_that_makes_no_sense_is_one_line(tmp_path, monkeypatch, capsys, command, status, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    assert main.main(command.split()) == status
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
