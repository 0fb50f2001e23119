"""What torch's class and its backend raise for a mistake: whoever catches that, catches ours.

Each case makes one mistake, with torch's class over Gloo and with ours. `except` of the class that torch's raised must
catch ours, unless ours works there, or the case says why it can't be the same.
"""

from __future__ import annotations

import contextlib
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import evenstep
from evenstep import errors

CAUGHT = (RuntimeError, ValueError, TypeError, NotImplementedError)  # that programs catch; the rest are accidents


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


# ---------------------------------------------------------------------- the constructor


def only_delayed(wrap):
    made = module()
    wrap(made, delay_all_reduce_named_params=[("0.weight", made[0].weight)])


def two_kinds_of_device(wrap):
    made = module()
    made.more = nn.Linear(2, 2, device="meta")
    wrap(made)


def other_shapes(wrap):
    wrap(nn.Linear(4, 3 + dist.get_rank()))


def device_ids_without_a_length(wrap):
    wrap(module(), device_ids=3)


def size_in_words(wrap):
    wrap(module(), bucket_cap_mb="many")


def sync_batchnorm_on_the_cpu(wrap):
    wrap(nn.SyncBatchNorm.convert_sync_batchnorm(module()))


# ---------------------------------------------------------------------- communication hooks


def average(state, bucket):
    return dist.all_reduce(bucket.buffer() / dist.get_world_size(), group=state, async_op=True).get_future()


def annotated_bucket(state, bucket: int):
    raise AssertionError


def annotated_result(state, bucket) -> int:
    raise AssertionError


def no_future(state, bucket):
    return bucket.buffer()


def failing(state, bucket):
    raise ValueError("the hook's own")


def failing_later(state, bucket):
    future = torch.futures.Future()
    future.set_exception(ValueError("the hook's own"))
    return future


def register(*hooks):
    def case(wrap):
        model = wrap(module())
        for hook in hooks:
            model.register_comm_hook(None, hook)

    return case


def run(*hooks):
    def case(wrap):
        model = wrap(module())
        for hook in hooks:
            model.register_comm_hook(None, hook)
        model(torch.ones(2, 4)).sum().backward()

    return case


def builtin_by_name(wrap):
    wrap(module())._register_builtin_comm_hook("ALLREDUCE")


def builtin_after_a_hook(wrap):
    model = wrap(module())
    model.register_comm_hook(None, average)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def sample_rate(wrap):
    wrap(module())._set_ddp_runtime_logging_sample_rate(0)


# ---------------------------------------------------------------------- forward, backward, join, pickling


def backward_twice(wrap):
    loss = wrap(module())(torch.ones(2, 4)).square().sum()
    loss.backward()
    loss.backward()


def static_graph_too_late(wrap):
    model = wrap(module())
    model(torch.ones(2, 4)).sum().backward()
    model._set_static_graph()


def early_termination(wrap):
    model = wrap(module())
    with model.join(throw_on_early_termination=True):
        for _ in range(1 + dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()


def join_of_no_joinable(wrap):
    with Join([module()]):
        pass


def joined_twice(wrap):
    model = wrap(module())
    with Join([model]), Join([model]):
        pass


def join_over_two_groups(wrap):
    members = list(range(dist.get_world_size()))
    models = [wrap(module(), process_group=dist.new_group(members, backend="gloo")) for _ in range(2)]
    with Join(models):
        pass


def pickled_in_a_sub_group(wrap):
    pickle.dumps(wrap(module(), process_group=dist.new_group(list(range(dist.get_world_size())), backend="gloo")))


def static_graph_and_a_hook_that_is_none(wrap):
    wrap(module(), static_graph=True).register_comm_hook(None, None)


def fused_optimizer_of_another_kind(wrap):
    wrap(module())._register_fused_optim(torch.optim.Rprop, 0.1)


def not_finalised(wrap):
    wrap(module())._check_reducer_finalized()


CASES = {
    each.__name__: each
    for each in (
        only_delayed,
        two_kinds_of_device,
        other_shapes,
        device_ids_without_a_length,
        size_in_words,
        sync_batchnorm_on_the_cpu,
        builtin_by_name,
        builtin_after_a_hook,
        sample_rate,
        backward_twice,
        static_graph_too_late,
        early_termination,
        join_of_no_joinable,
        joined_twice,
        join_over_two_groups,
        pickled_in_a_sub_group,
        static_graph_and_a_hook_that_is_none,
        fused_optimizer_of_another_kind,
        not_finalised,
    )
} | {
    "hook_that_is_none": register(3),
    "hook_with_another_bucket": register(annotated_bucket),
    "hook_with_another_result": register(annotated_result),
    "two_hooks": register(average, average),
    "hook_for_gpus": register(dist.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook),
    "hook_without_a_future": run(no_future),
    "hook_that_fails": run(failing),
    "hook_that_fails_later": run(failing_later),
}

# Where torch's refuses, and ours works: why.
WORKS = {
    "sync_batchnorm_on_the_cpu": "SyncBatchNorm works on the CPU",
    # From torch 2.15 on, known by its new dtype, torch's does so, too.
    **({} if hasattr(torch, "bcomplex32") else {"hook_for_gpus": "compresses on the CPU, too"}),
    "hook_with_another_bucket": "annotations aren't read: under `from __future__ import annotations` torch's class "
    "refuses right ones",
    "hook_with_another_result": "as hook_with_another_bucket",
    "builtin_by_name": "names are understood",
    "static_graph_too_late": "nothing depends on it",
}
# Where `except` of what torch's raises doesn't catch ours: why.
OTHERWISE = {
    "hook_that_fails_later": "ours is the hook's own exception, which torch's reducer can't cast to a tensor",
}


# ---------------------------------------------------------------------- collectives


def on(operation, *shapes, **options):
    return lambda group: operation(*(torch.ones(shape) for shape in shapes), group=group, **options)


def pieces(*shapes):
    return [torch.ones(shape) for shape in shapes]


COLLECTIVES = {
    "no tensor": lambda group: dist.all_reduce([1.0], group=group),
    "a tensor in the place of a list": lambda group: dist.all_gather(torch.ones(2), torch.ones(2), group=group),
    "an unknown root": on(dist.broadcast, 2, src=7),
    "a root of a text": on(dist.broadcast, 2, src="first"),
    "an unknown destination": on(dist.reduce, 2, dst=7),
    "too few to gather into": lambda group: dist.all_gather(pieces(2), torch.ones(2), group=group),
    "another shape to gather into": lambda group: dist.all_gather(pieces(2, 3), torch.ones(2), group=group),
    "another dtype to gather into": lambda group: dist.all_gather(
        [each.double() for each in pieces(2, 2)], torch.ones(2), group=group
    ),
    "too short to gather into": lambda group: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2), group=group),
    "nothing to scatter": lambda group: dist.scatter(torch.ones(2), None, src=0, group=group),
    "too few to scatter": lambda group: dist.scatter(
        torch.ones(2), pieces(2) if dist.get_rank() == 0 else None, src=0, group=group
    ),
    "too few to reduce and scatter": lambda group: dist.reduce_scatter(torch.ones(2), pieces(2), group=group),
    "splits that don't add up": lambda group: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [1, 1], [3, 3], group=group
    ),
    "a message to itself": lambda group: dist.send(torch.ones(2), dst=dist.get_rank(), group=group),
    "a message to nobody": lambda group: dist.send(torch.ones(2), dst=9, group=group),
    "bits of real numbers": on(dist.all_reduce, 2, op=dist.ReduceOp.BAND),
    "the larger of complex numbers": lambda group: dist.all_reduce(
        torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX, group=group
    ),
    "an operator that is none": on(dist.all_reduce, 2, op="sum"),
    "an object that can't be sent": lambda group: (
        dist.broadcast_object_list([lambda: 0] * 1, src=0, group=group)
        if dist.get_rank() == 0
        else pickle.dumps(lambda: 0)
    ),
    "objects into nothing": lambda group: dist.all_gather_object([], 1, group=group),
    "an unknown rank of a group": lambda group: dist.get_group_rank(group, 9),
    "a group of unknown ranks": lambda group: dist.new_group([0, 9]),
    "a group that is none": lambda group: dist.all_reduce(torch.ones(2), group="everybody"),
    "operations that are none": lambda group: dist.batch_isend_irecv(["send"]),
}


def mesh(shape=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def kinds_of(error):
    return None if error is None else [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)]


def raised(case, wrap):
    try:
        case(wrap)
    except Exception as error:
        return error
    return None


def mistakes(names, of_collectives):
    """By case: what torch's raised and what ours did, as names of classes from the most special on; the text.

    Args:
        names: The cases.
        of_collectives: They are of groups with the backends "gloo" and "evenstep", and not of the classes.
    """
    world = evenstep.init(quiet=True)
    found = {}
    for name in names:
        # Where models differ torch's class raises on one rank, and the other waits.
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))

        def torchs(made, *, gloo=gloo, **options):
            options.setdefault("process_group", None if "device_mesh" in options else gloo)
            return TorchDistributedDataParallel(made, **options)

        if of_collectives:
            case, both = COLLECTIVES[name], (gloo, dist.new_group(backend="evenstep", timeout=timedelta(seconds=4)))
        else:
            case, both = CASES[name], (torchs, evenstep.DistributedDataParallel)
        outcomes = []
        for each in both:
            error = raised(case, each)
            world.control.barrier().wait()
            outcomes.append((kinds_of(error), str(error).splitlines()[0] if error is not None else ""))
        found[name] = outcomes
    return found


def judged(found):
    """What is wrong, of what a rank found."""
    for name, ((torchs, told), (ours, told_ours)) in found.items():
        names = [kind.__name__ for kind in CAUGHT]
        caught = set([kind for kind in torchs or () if kind in names][:1])  # what a program would catch
        told = f"{name}: torch's {torchs} ({told}), ours {ours} ({told_ours})"
        if ours is None and torchs is not None:
            if name not in WORKS:
                yield f"{told}: and that it works isn't listed"
        elif name in WORKS:
            yield f"{told}: listed as one that works"
        elif torchs is None:
            if ours is not None:
                yield f"{told}: refused by ours alone"
        elif (caught <= set(ours)) is (name in OTHERWISE):
            yield f"{told}: {'is caught, and listed' if name in OTHERWISE else 'is not caught'}"


@pytest.mark.extended
def test_what_catches_torchs_exceptions_catches_ours(ranks):
    for found in ranks.run(mistakes, 2, list(CASES), False, timeout_s=120):
        assert list(judged(found)) == []


@pytest.mark.extended
def test_what_catches_gloos_exceptions_catches_ours(ranks):
    for found in ranks.run(mistakes, 2, list(COLLECTIVES), True, timeout_s=150):
        assert list(judged(found)) == []


def test_the_tree_of_errors_is_caught_as_torchs_is():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(kind, RuntimeError) for kind in kinds)
    assert issubclass(errors.ConfigurationError, ValueError | TypeError)
    for kind in kinds:
        if kind is not errors.RankFailedError:
            with contextlib.suppress(kind):
                raise pickle.loads(pickle.dumps(kind("text of it")))
            assert str(kind("text of it")) == "text of it"
