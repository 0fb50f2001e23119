"""Whatever of torch's own programs torch's class passes, ours passes, but for a list with reasons."""

from __future__ import annotations

import pytest

from tests.torchs_own.playing import names_of_programs, play

WORKS = "expects an error, or its text, where ours works"
PRIVATE = "calls a part of torch's reducer, which isn't set up"
LOGGED = "reads an entry of the logging data that ours doesn't have: see docs/reference/ddp-compatibility.md"

# torch's class passes, ours doesn't: why.
LISTED = {
    "test_ddp_native_mixed_precision_ignored_params": "mixed_precision= is refused: torch.autocast",
    "test_ddp_logging_data_cpu": LOGGED,
    "test_ddp_python_error_logged": LOGGED,
    "test_static_graph_api_cpu": WORKS,
    "test_invalid_static_graph": WORKS,
    "test_ddp_unused_params_rebuild_buckets_exception": WORKS,
    "test_ddp_multiple_nested_unused_params_error": WORKS,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": WORKS,
    "test_ddp_broadcast_buffers_deprecation_warning": "expects a warning of an argument that isn't deprecated here",
    "test_ddp_profiling_torch_profiler": "counts all-reduces of Gloo in a profile: a step has a header, too",
    "test_different_graph_across_ranks": "expects buckets to stay as they were where parameters are unused",
    "test_ddp_control_flow_same_across_ranks": PRIVATE,
    "test_ddp_control_flow_different_across_ranks": PRIVATE,
    "test_ddp_build_debug_param_to_name_mapping": PRIVATE,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": PRIVATE,
    "test_detect_ddp_is_actually_static": PRIVATE,
    "test_ddp_remove_autograd_hooks": PRIVATE,
    "test_ddp_broadcast_buffer_via_hook": "_register_buffer_comm_hook is refused",
    "test_ddp_buffer_hook_allreduce": "_register_buffer_comm_hook is refused",
    "test_ddp_buffer_hook_allreduce_return_future": "_register_buffer_comm_hook is refused",
    "test_ddp_sink_noclone": "forbids `clone`: the first forward pass remembers a sample, for empty shares",
    "test_skip_all_reduce_unused_parameters": "counts buckets that were left out; ours sends all of them, as zeros",
}

SAMPLE = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_namedtuple",
    "test_stateless_api_with_ddp",
)


def outcome(ranks, tmp_path, name, whose, nproc):
    """What the ranks say of a program: "passed", "skipped", or what failed."""
    directory = tmp_path / f"{name}-{whose[:4]}"
    directory.mkdir()
    try:
        told = ranks.run(play, nproc, name, whose, nproc, str(directory), timeout_s=300)
    except Exception as error:  # it hangs, or a rank has died
        return f"{type(error).__name__}: {error}"
    failures = [why for what, why in told if what == "failed"]
    if failures:
        # A rank that lost its peers fails behind the one that has a reason.
        return next((why for why in failures if "gloo/transport" not in why), failures[0])
    return "passed" if all(what == "passed" for what, _ in told) else "skipped"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_what_torchs_class_passes_ours_passes(ranks, tmp_path, nproc):
    (names, *_) = ranks.run(names_of_programs, nproc, nproc, str(tmp_path))
    assert len(names) > 60
    unexpected, num_passed, rows = {}, 0, []
    for name in names:
        torchs = outcome(ranks, tmp_path, name, "torch's", nproc)
        ours = outcome(ranks, tmp_path, name, "ours", nproc) if torchs == "passed" else "not played"
        rows.append(f"{name}: torch's {_short(torchs)}, ours {_short(ours)}")
        print(rows[-1], flush=True)  # noqa: T201
        num_passed += ours == "passed"
        if torchs == "passed" and (ours == "passed") is (name in LISTED):
            unexpected[name] = ours
    print(f"{len(names)} programs on {nproc} ranks; torch's class and ours both pass {num_passed}")  # noqa: T201
    assert not unexpected, "\n".join(f"=== {name}\n{why}" for name, why in unexpected.items())


def _short(outcome):
    return outcome if outcome in ("passed", "skipped", "not played") else "failed"


@pytest.mark.brief
@pytest.mark.extended
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_torchs_own_programs(ranks, tmp_path, name):
    assert outcome(ranks, tmp_path, name, "ours", 2) == "passed"
