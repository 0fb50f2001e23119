from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args

from evenstep.errors import ConfigurationError
from evenstep.launcher.elastic.rendezvous import FixedNodesRendezvous, OneNodeRendezvous, choose
from evenstep.launcher.options.flags import (
    behind_the_script,
    for_workers,
    handled_signals,
    plan_nodes,
)
from evenstep.launcher.options.flags import parse as parse_line


def parse(*arguments: str) -> Namespace:
    return parse_line(list(arguments))


def test_variables_of_torchrun_beat_our_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "9")
    args = parse("train.py")
    assert (args.nproc_per_node, args.shutdown_timeout) == ("3", 9)
    assert parse("--nproc-per-node", "1", "train.py").nproc_per_node == "1"
    assert parse("train.py").master_port is None
    monkeypatch.setenv("PET_MASTER_PORT", "29411")
    assert plan_nodes(parse("train.py")).port == 29411
    assert plan_nodes(parse("--master-port", "29412", "train.py")).port == 29412


def test_a_scripts_own_flags_may_look_like_abbreviations_of_ours() -> None:
    """`--n` could be --nnodes and --nproc-per-node; behind the script it is neither."""
    args = parse_line(["--nproc-per-node", "2", "train.py", "--n", "6", "--no", "--m=x"])
    assert (args.nproc_per_node, args.training_script) == ("2", "train.py")
    assert args.training_script_args == ["--n", "6", "--no", "--m=x"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--start-method thread", "invalid choice: 'thread'"),
        ("--role", "argument --role: expected one argument"),
        ("--no-such 3", "unrecognized arguments: --no-such"),
    ],
)
def test_a_flag_that_torch_refuses_is_said_in_one_line(flags: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        parse(*flags.split(), "--device", "cpu", "train.py")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id x --rdzv-conf a=b",
        "--nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=a:1 --rdzv_id=x --rdzv_conf=a=b",
        "--standalone --max-restarts 3 --monitor-interval 1 --signals-to-handle SIGTERM --shutdown-timeout 7",
        "--node-rank 1 --master-addr a --master-port 1 --local-addr b --local-ranks-filter 0",
    ],
)
def test_flags_of_torchrun_and_ours_are_understood(flags: str) -> None:
    args = parse(*flags.split(), "train.py", "--epochs", "3", "-m")
    assert (args.training_script, args.training_script_args) == ("train.py", ["--epochs", "3", "-m"])


@pytest.mark.parametrize(
    ("flags", "kind"), [([], "script"), (["-m"], "module"), (["--no-python"], "program"), (["--run-path"], "script")]
)
def test_the_worker_is_run_in_place_of_the_target(flags: list[str], kind: str) -> None:
    args = for_workers(parse(*flags, "target", "-x", "1"), num_ranks=3, parent_pid=77)
    assert (args.module, args.no_python, args.run_path, args.nproc_per_node) == (False, False, False, "3")
    assert Path(args.training_script).name == "start_worker.py"
    assert args.training_script_args == ["77", kind, "target", "-x", "1"]


@pytest.mark.parametrize(
    ("flags", "meets", "where"),
    [
        ("", OneNodeRendezvous, ("127.0.0.1", 0)),
        ("--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:29400", OneNodeRendezvous, ("127.0.0.1", 0)),
        ("--master-port 29411", OneNodeRendezvous, ("127.0.0.1", 29411)),
        ("--nnodes 2 --master-addr a", FixedNodesRendezvous, ("a", 29500)),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint [fd00::1]:29411", FixedNodesRendezvous, ("fd00::1", 29411)),
        ("--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint a:1", None, "a:1"),
    ],
)
def test_where_the_nodes_of_a_run_meet(flags: str, meets: type | None, where: object) -> None:
    args = parse(*flags.split(), "train.py")
    nodes, (config, _, _) = plan_nodes(args), config_from_args(for_workers(args, num_ranks=1, parent_pid=1))
    backend = config.rdzv_backend
    choose(nodes, config)
    if meets is None:
        assert (config.rdzv_backend, config.rdzv_endpoint) == (backend, where)
        return
    handler = config.rdzv_configs["handler"]
    assert type(handler) is meets
    assert (handler.master_addr, handler.master_port) == where
    assert (handler.rank, handler.world_size) == (nodes.rank, nodes.most)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes 2 --node-rank 1", "where is node 0"),
        ("--standalone --nnodes 2", "--standalone means one host, but --nnodes 2 means more"),
        ("--nnodes 1:2 --master-addr a", "--nnodes 1:2: a number that changes needs --rdzv-backend c10d"),
        *((f"--nnodes={number}", "--nnodes") for number in ("0", "x", "2:1", "1:2:3", "-1")),
        *(
            (f"--rdzv-endpoint {endpoint}", "HOST:PORT")
            for endpoint in ("localhost", "a:", ":29500", "a:x", "a:²", "a:99999")
        ),
    ],
)
def test_nodes_that_could_never_meet(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_nodes(parse(*flags.split(), "train.py"))


@pytest.mark.parametrize("names", ["SIGKILL", "SIGTERM,SIGSTOP", "SIGTREM", "SIG_DFL", "15"])
def test_signals_that_nothing_can_handle_are_refused(names: str) -> None:
    with pytest.raises(ConfigurationError, match="no signal that can be handled"):
        parse("--signals-to-handle", names, "train.py")


def test_handled_signals() -> None:
    assert handled_signals(" SIGTERM , SIGINT,") == [signal.SIGTERM, signal.SIGINT]
    assert handled_signals("") == []


def test_an_interval_that_no_clock_measures_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--monitor-interval=1e\\+300; a number, greater than 0 and at most"):
        parse("--monitor-interval", "1e300", "train.py")


@pytest.mark.parametrize(
    ("behind", "flag"),
    [
        (["--epochs", "3", "--nproc-per-node", "2"], "--nproc-per-node"),
        (["--nproc_per_node=2", "--nnodes", "2"], "--nproc_per_node=2"),
        (["--device", "cpu", "--log-dir", "logs", "--nproc"], None),
        (["--", "--nproc-per-node", "2"], None),
    ],
)
def test_flags_of_the_launchers_own_behind_the_script_are_noticed(behind: list[str], flag: str | None) -> None:
    arguments = ["--nproc-per-node", "2", "train.py", *behind]
    assert behind_the_script(parse_line(arguments), arguments) == flag
