"""`evenstep verify`, the parts that decide: what is rounding, what is not, and why."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.tools.observing.changes import same_samples, switch_off_dropout
from evenstep.tools.observing.graphs import node_counts
from evenstep.tools.observing.models import digest
from evenstep.tools.observing.patching import Patches
from evenstep.tools.verify import causes, compare
from evenstep.tools.verify.causes import find_weights
from evenstep.tools.verify.double import InDouble, widen
from evenstep.tools.verify.evidence import NUM_PROBES, Plan, Run, Seen, probe, read_run, thinned, write_step
from evenstep.tools.verify.rank import Steps
from evenstep.tools.verify.ranks import sizes_for
from evenstep.tools.verify.report import Report, Verdict


def a_run(*ranks: Seen, values: Mapping[str, Tensor] | None = None, probes: object = None) -> Run:
    """A run of one step."""
    given = dict(values or {})
    return Run([[seen] for seen in ranks], lambda step: given, lambda rank, step: (probes or {}).get(rank, {}))  # type: ignore[attr-defined]


def seen(**changes: object) -> Seen:
    return Seen(**{"losses": [(1.0, None)], "virtual_ranks": [{}], "graphs": [{"Mean": 1}], **changes})  # type: ignore[arg-type]


def noisy(values: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {name: (value * (1 + scale * torch.randn(value.shape))).float() for name, value in values.items()}


@pytest.fixture
def exact(fresh_seed: int) -> dict[str, Tensor]:
    torch.manual_seed(fresh_seed)
    return {
        "grad/a": torch.randn(400, dtype=torch.float64),
        "grad/b": 1e-3 * torch.randn(30, dtype=torch.float64),
        "param/a": torch.randn(400, dtype=torch.float64),
        "param/b": torch.randn(30, dtype=torch.float64),
    }


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
def test_what_lies_as_far_from_float64_as_another_run_is_rounding(exact, noise):
    base, reference = a_run(seen(), values=noisy(exact, noise)), a_run(seen(), values=exact)
    other = a_run(seen(), seen(), values=noisy(exact, noise))
    assert compare.first_difference(base, reference, other) is None
    assert compare.coarsest_rounding(base, reference) == pytest.approx(noise, rel=0.5)
    assert compare.closeness(base, other) == pytest.approx(noise * math.sqrt(2), rel=0.7)


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
def test_what_lies_further_is_named(exact, noise):
    base, reference = a_run(seen(), values=noisy(exact, noise)), a_run(seen(), values=exact)
    wrong = noisy(exact, noise)
    wrong["grad/b"] = wrong["grad/b"] * (1 + 100 * noise)
    found = compare.first_difference(base, reference, a_run(seen(), seen(), values=wrong))
    assert found is not None
    assert (found.step, found.kind, found.name) == (1, "gradient", "b")
    assert (found.num_differing, found.num_compared) == (1, 2)
    assert found.deviation == pytest.approx(100 * noise, rel=0.2)
    assert "gradient of 'b' is off by" in str(found)


def test_the_loss_comes_first_and_gradients_before_parameters(exact):
    base, reference = a_run(seen(), values=noisy(exact, 1e-7)), a_run(seen(), values=exact)
    wrong = {name: value * 2 for name, value in noisy(exact, 1e-7).items()}
    for losses, kind in (([(1.1, None)], "loss"), ([(1.0, None)], "gradient")):
        found = compare.first_difference(base, reference, a_run(seen(losses=losses), values=wrong))
        assert found is not None
        assert found.kind == kind


def test_a_missing_gradient_and_nan_differ(exact):
    base, reference = a_run(seen(), values=noisy(exact, 1e-7)), a_run(seen(), values=exact)
    without = {name: value for name, value in exact.items() if name != "grad/b"}
    with_nan = {**exact, "param/a": exact["param/a"] * math.nan}
    for values, name in ((without, "b"), (with_nan, "a")):
        found = compare.first_difference(base, reference, a_run(seen(), values=values))
        assert found is not None
        assert found.name == name
        assert found.deviation == math.inf


def test_what_shrinks_in_float64_was_rounding_and_what_stays_is_a_mistake(exact):
    """A kink that was crossed is as large as a mistake in float32, and isn't there in float64."""
    base, reference = a_run(seen(), values=noisy(exact, 1e-7)), a_run(seen(), values=exact)
    moved = noisy(exact, 1e-7)
    moved["grad/a"][3] += 0.1
    single = a_run(seen(), seen(), values=moved)
    assert compare.first_difference(base, reference, single) is not None
    crossed = {name: value * (1 + 1e-15) for name, value in exact.items()}
    assert compare.first_difference(base, reference, single, a_run(seen(), values=crossed)) is None
    mistaken = {**crossed, "grad/a": moved["grad/a"].double()}
    found = compare.first_difference(base, reference, single, a_run(seen(), values=mistaken))
    assert found is not None
    assert found.name == "a"


def test_a_gradient_that_is_nothing_but_rounding_may_have_any_value(exact):
    """Like that of a bias before batch normalisation: 0, had one exact numbers."""
    zero = {**exact, "grad/b": 1e-18 * torch.randn(30, dtype=torch.float64)}
    base = a_run(seen(), values={**noisy(exact, 1e-7), "grad/b": 1e-8 * torch.randn(30)})
    other = a_run(seen(), values={**noisy(exact, 1e-7), "grad/b": 1e-8 * torch.randn(30)})
    assert compare.first_difference(base, a_run(seen(), values=zero), other) is None


def test_identical_means_every_bit_on_every_rank():
    same = {"grad/a": "1", "param/a": "2", "buffer/m": "3"}
    base = a_run(seen(digests=same))
    assert compare.are_identical(base, a_run(seen(digests=same), seen(digests={**same, "buffer/m": "9"})))
    assert not compare.are_identical(base, a_run(seen(digests=same), seen(digests={**same, "param/a": "9"})))
    assert not compare.are_identical(base, a_run(seen(digests={**same, "buffer/m": "9"})))


def test_in_reproducible_mode_the_virtual_rank_is_named():
    virtual_ranks = [{"a": str(virtual_rank)} for virtual_rank in range(4)]
    digests = {"grad/a": "sum"}
    losses = [(1.0, 2.0)]
    base = a_run(seen(virtual_ranks=virtual_ranks, losses=losses * 4, virtual_ranks_of_run=4, digests=digests))
    wrong = [*virtual_ranks[:2], {"a": "9"}, virtual_ranks[3]]
    summed = {"grad/a": "x"}
    other = [seen(virtual_ranks=part, losses=losses * 2, digests=summed) for part in (wrong[:2], wrong[2:])]
    assert not compare.are_identical(base, a_run(*other))
    found = compare.first_other_bits(base, a_run(*other))
    assert found is not None
    assert (found.kind, found.name, found.virtual_rank) == ("gradient", "a", 2)
    assert "virtual rank 2: gradient of 'a' has other bits" in str(found)


def test_the_loss_is_weighed_like_the_gradient():
    assert compare.loss_of([seen(losses=[(1.0, None), (2.0, None)]), seen(losses=[(3.0, None), (4.0, None)])]) == 5.0
    weighed = [seen(losses=[(1.0, 3.0), (math.nan, 0.0)]), seen(losses=[(5.0, 1.0)])]
    assert compare.loss_of(weighed) == 2.0


# ---------------------------------------------------------------------- causes


def of_passes(weights: list[float], applied: list[float], *, foreign: float = 0.0) -> tuple[Run, Run]:
    """Runs on one rank and on several, whose backward passes are weighed so in either's gradient."""
    passes = torch.randn(len(weights), 300, dtype=torch.float64)
    right = torch.tensor(weights, dtype=torch.float64) @ passes + foreign * torch.randn(300, dtype=torch.float64)
    got = torch.tensor(applied, dtype=torch.float64) @ passes
    probes = {rank: {"applied": got, "0": passes[rank]} for rank in range(len(weights))}
    ranks = [seen(rows=[[str(rank)]]) for rank in range(len(weights))]
    base = a_run(seen(rows=[[str(rank) for rank in range(len(weights))]]), probes={0: {"applied": right}})
    return base, a_run(*ranks, probes=probes)


def kinds(base: Run, run: Run) -> list[str]:
    return [cause.kind for cause in causes.find_causes(base, run, 0, rounding=1e-12)]


def test_weights_are_found(fresh_seed: int):
    torch.manual_seed(fresh_seed)
    draw = random.Random(fresh_seed)
    right = [draw.uniform(0.1, 1) for _ in range(4)]
    base, run = of_passes(right, [0.25] * 4)
    weights = find_weights(base, run, 0)
    assert weights is not None
    assert weights.right == pytest.approx(right)
    assert weights.applied == pytest.approx([0.25] * 4)
    assert weights.unexplained < 1e-12
    assert kinds(base, run) == ["average"]
    text = causes.find_causes(base, run, 0, rounding=1e-12)[0].text
    assert f"rank 0 by 0.25 instead of {right[0]:.4g}" in text


@pytest.mark.parametrize(("factor", "told"), [(0.5, "0.5 times"), (2.0, "2 times")])
def test_a_factor_common_to_all_is_a_loss_averaged_over_the_wrong_number(factor, told):
    base, run = of_passes([0.5, 0.5], [0.5 * factor] * 2)
    found = causes.find_causes(base, run, 0, rounding=1e-12)
    assert [cause.kind for cause in found] == ["average"]
    assert told in found[0].text


def test_with_accumulation_it_is_the_divisor():
    base, run = of_passes([0.5, 0.5], [0.25, 0.25])
    for each in run.at(0):
        each.virtual_ranks = [{}, {}]
    assert kinds(base, run) == ["divisor"]


def test_batch_norm_is_blamed_only_where_no_weights_explain_the_difference():
    base, run = of_passes([0.5, 0.5], [0.5, 0.5], foreign=0.1)
    for each in run.at(0):
        each.unsynced = ["1"]
    assert kinds(base, run) == ["batch norm"]
    base, run = of_passes([0.7, 0.3], [0.5, 0.5])
    for each in run.at(0):
        each.unsynced = ["1"]
    assert kinds(base, run) == ["average"]


def data(*ranks: list[str]) -> Run:
    return a_run(*(seen(rows=[rows]) for rows in ranks))


@pytest.mark.parametrize(
    ("ranks", "kind", "told"),
    [
        ((["a", "b"], ["a", "b"]), "repeated", "2 of the 4 samples of 2 ranks are repetitions (rank 1 saw 2 of rank 0"),
        ((["a", "b"], ["c", "a"]), "repeated", "1 of the 4"),
        ((["a", "b"], ["c"]), "samples", "4 samples on 1, 3 on 2"),
        ((["a", "b"], ["c", "e"]), "samples", "1 of 4 samples are not among those of 1 rank"),
    ],
)
def test_samples(ranks, kind, told):
    found = causes.find_causes(data(["a", "b", "c", "d"]), data(*ranks), 0, rounding=1e-12)
    assert found[0].kind == kind
    assert told in found[0].text


def test_numbers_that_all_ranks_draw_alike_are_no_data():
    """Loaders have given each rank samples of its own: what repeats was drawn by the script."""
    base = a_run(seen(rows=[["n", "m"]], loaded=["a", "b"]))
    run = a_run(seen(rows=[["n"]], loaded=["a"]), seen(rows=[["n"]], loaded=["b"]))
    for found in (causes.find_causes(base, run, 0, rounding=1e-12), causes.find_faults(run)):
        assert [cause.kind for cause in found] == ["random"]
        assert "the same random numbers on several ranks" in found[0].text
    twice = a_run(seen(rows=[["n"]], loaded=["a"]), seen(rows=[["n"]], loaded=["a"]))
    assert kinds(base, twice) == ["repeated"]
    assert [cause.kind for cause in causes.find_faults(twice)] == ["repeated"]


def test_two_runs_on_as_many_ranks_show_whether_a_script_is_seeded():
    base = a_run(seen(loaded=["a"], initial={"param/w": 1.0, "inputs": 2.0}))
    for fine in ({"param/w": 1.0, "inputs": 2.0}, {"param/w": 1.000001}):
        assert causes.find_unseeded(base, a_run(seen(loaded=["a"], initial=fine))) == []
    for other, told in (
        (seen(loaded=["a"], initial={"param/w": 1.1}), "the initial 'w'"),
        (seen(loaded=["b"], initial={"param/w": 1.0}), "the samples of step 1"),
        (seen(loaded=["a"], initial={"param/w": 1.0, "inputs": 2.1}), "the samples of step 1"),
    ):
        (found,) = causes.find_unseeded(base, a_run(other))
        assert found.kind == "not seeded"
        assert f"two runs on 1 rank differ in {told}" in found.text


def test_in_reproducible_mode_dropout_shows_whether_a_script_is_seeded():
    """Elsewhere it is off, and its masks may be anything."""
    base, again = (a_run(seen(dropouts=[state], virtual_ranks_of_run=8)) for state in "ab")
    (found,) = causes.find_unseeded(base, again)
    assert "differ in the random numbers of the virtual ranks" in found.text
    assert causes.find_unseeded(base, base) == []
    assert causes.find_unseeded(a_run(seen(dropouts=["a"])), a_run(seen(dropouts=["b"]))) == []


def test_inputs_that_no_loader_has_given_are_told_as_such():
    """They may be drawn alike on all ranks, or be read whole."""
    base = a_run(seen(rows=[["n", "m"]]))
    run = a_run(seen(rows=[["n"]]), seen(rows=[["n"]]))
    for found in (causes.find_causes(base, run, 0, rounding=1e-12), causes.find_faults(run)):
        assert [cause.kind for cause in found] == ["repeated"]
        assert found[0].text.startswith("the same inputs on several ranks: ")
        assert "seed the ranks differently" in found[0].text


def test_a_cause_names_the_line_and_whether_work_is_lost():
    lines = {"loader": ("a.py", 3), "loss": ("a.py", 9), "optimizer": ("a.py", 11), "model": ("b.py", 8)}
    base = a_run(seen(rows=[["a", "b"]], loaded=["a", "b"]))
    twice = a_run(*(seen(rows=[["a"]], loaded=["a"], lines=lines) for _ in range(2)))
    (found,) = causes.find_causes(base, twice, 0, rounding=1e-12)
    assert (found.path, found.line, found.is_note) == ("a.py", 3, False)
    rates = a_run(seen(settings=[{"lr": 0.1}], lines=lines), seen(settings=[{"lr": 0.2}], lines=lines))
    (found,) = causes.find_causes(a_run(seen(settings=[{"lr": 0.1}])), rates, 0, rounding=1e-12)
    assert (found.path, found.line, found.is_note) == ("a.py", 11, True)
    report = Report("a.py", 1, 1, 0, (Verdict(2, 0.0, None, (found,)), Verdict(4, 0.0, None, (found,))))
    assert report.causes == [(2, found)]
    plain = json.loads(report.as_json())["runs"][0]["causes"]
    assert plain == [{"kind": "settings", "text": found.text, "path": "a.py", "line": 11, "is_note": True}]


def test_a_cause_is_named_alone():
    """Of batch norm's statistics and random numbers nothing is known where the samples are others."""
    base = a_run(seen(rows=[["a", "b"]]))
    run = a_run(*(seen(rows=[["a"]], unsynced=["1"], draws=True, settings=[{"lr": 2.0}]) for _ in range(2)))
    assert kinds(base, run) == ["repeated"]


def test_a_loss_that_is_no_sum_over_samples_is_named_where_no_weights_explain_the_difference():
    base, run = of_passes([0.5, 0.5], [0.5, 0.5], foreign=0.1)
    for each in run.at(0):
        each.virtual_ranks = [{"w": "1"}]
    assert kinds(base, run) == ["batch statistics"]
    base, run = of_passes([0.5, 0.5], [0.5, 0.5])
    for each in run.at(0):
        each.virtual_ranks = [{"w": "1"}]
    assert kinds(base, run) == [], "each pass counts as it should"
    base, run = of_passes([0.7, 0.3], [0.5, 0.5])
    assert kinds(base, run) == ["average"]
    base, run = of_passes([0.5, 0.5], [0.5, 0.5], foreign=0.1)
    for each in run.at(0):
        each.virtual_ranks, each.draws = [{"w": "1"}], True
    assert kinds(base, run) == ["random"], "what draws isn't known to be computed over the batch"


def test_nodes_are_counted_by_kind():
    batch = torch.randn(4, 3, requires_grad=True)
    product = batch @ batch.t()
    assert node_counts((product + product).mean()) == {
        "MeanBackward0": 1,
        "AddBackward0": 1,
        "MmBackward0": 1,
        "TBackward0": 1,
        "torch::autograd::AccumulateGrad": 1,
    }


@pytest.mark.parametrize(("values", "is_fine"), [({"grad/w": 0.0}, False), ({}, False), ({"grad/w": 1.0}, True)])
def test_gradients_that_are_all_zero_are_a_fault(values: dict[str, float], is_fine: bool):
    steps = Run([[seen()] * 2], lambda step: {name: torch.full((3,), value) for name, value in values.items()}, dict)
    found = causes.find_faults(steps)
    assert [cause.kind for cause in found] == ([] if is_fine else ["no gradient"])
    text = Verdict(2, 0.0, None, tuple(found)).text(is_reproducible=False)
    assert text == ("identical bits" if is_fine else "nothing to compare: every gradient is zero")


def test_equal_samples_in_a_data_set_are_no_repetition():
    assert kinds(data(["a", "a", "b"]), data(["b", "a"], ["a"])) == []


def test_branches_are_found_by_modules_and_by_graphs():
    base, first, second = seen(rows=[["x", "y"]]), {"rows": [["x"]]}, {"rows": [["y"]]}
    modules = a_run(seen(**first, modules=["a", "b"]), seen(**second, modules=["a"]))
    (found,) = causes.find_causes(a_run(base), modules, 0, rounding=0)
    assert "module 'b' runs on rank 0 and not on rank 1" in found.text
    graphs = a_run(seen(**first, graphs=[{"Mul": 1}]), seen(**second, graphs=[{"Mul": 2}]))
    (found,) = causes.find_causes(a_run(base), graphs, 0, rounding=0)
    assert "1 node Mul on rank 0, and 2 on rank 1" in found.text


def test_settings_and_drift():
    base = a_run(seen(settings=[{"lr": 0.1}]))
    assert kinds(base, a_run(seen(settings=[{"lr": 0.1}]), seen(settings=[{"lr": 0.2}]))) == ["settings"]
    drifting = a_run(seen(digests={"param/a": "1"}), seen(digests={"param/a": "2"}))
    assert kinds(base, drifting) == ["drift"]
    assert [cause.kind for cause in causes.find_faults(drifting)] == ["drift"]


def test_faults_that_change_no_gradient():
    masks = a_run(seen(dropouts=["s"]), seen(dropouts=["t"]), seen(dropouts=["s"]))
    assert "ranks 0 and 2 draw the same dropout masks" in causes.find_faults(masks)[0].text
    assert causes.find_faults(a_run(seen(dropouts=["s"]), seen(dropouts=["t"]))) == []
    assert causes.find_faults(a_run(seen(dropouts=["s"]))) == []
    assert "all 2 ranks see the same 1 samples" in causes.find_faults(data(["a"], ["a"]))[0].text
    sums = a_run(seen(losses=[(1.0, None)] * 3, means=3, held_back=True))
    assert "adds up 3 backward passes" in causes.find_faults(sums)[0].text
    added = {"losses": [(1.0, None)] * 3, "means": 3, "held_back": True}
    for fine in ({"means": 2}, {"held_back": False}, {"virtual_ranks_of_run": 8}):
        assert causes.find_faults(a_run(seen(**{**added, **fine}))) == []


# ---------------------------------------------------------------------- what is changed in the rank


@pytest.fixture
def patches():
    patches = Patches()
    yield patches
    patches.restore()


def test_patches_put_everything_back(patches: Patches):
    class Base:
        def f(self) -> int:
            return 1

    class Derived(Base):
        pass

    patches.replace(Derived, "f", lambda original: lambda self: original(self) + 1)
    patches.replace(Base, "f", lambda original: lambda self: original(self) * 10)
    patches.replace(Base, "missing", lambda original: original)
    assert (Derived().f(), Base().f()) == (2, 10)
    patches.restore()
    assert (Derived().f(), Base().f(), vars(Derived).get("f")) == (1, 1, None)


def test_nothing_is_dropped_and_states_are_asked_for(patches: Patches):
    asked: list[bool] = []

    def about_to_draw() -> bool:
        asked.append(True)
        return False

    switch_off_dropout(patches, about_to_draw)
    x = torch.randn(2, 3, 4)
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with torch.no_grad():
        assert torch.equal(nn.Dropout(0.5)(x), x)
        assert torch.equal(F.dropout(x, 0.5), x)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        assert torch.equal(nn.AlphaDropout(0.5)(x), x)
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        assert torch.equal(attended, F.scaled_dot_product_attention(x, x, x))
        assert torch.equal(lstm(x)[0], lstm(x)[0])
    assert lstm.dropout == 0.5
    assert len(asked) == 7
    F.dropout(x, 0.5, training=False)
    nn.Dropout(0.0)(x)
    assert len(asked) == 7


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_recurrent_layer_computes_in_float64(kind: type[nn.RNNBase], patches: Patches, fresh_seed: int):
    """It compares the dtypes of its input and its weights by itself."""
    torch.manual_seed(fresh_seed)
    model, x = kind(3, 4), torch.randn(5, 2, 3)
    single = model(x)[0]
    InDouble(patches)
    widen(model)
    out = model(x)[0]
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, single, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_a_forward_in_float64_has_the_same_parameters_and_no_float32(patches: Patches, fresh_seed: int):
    torch.manual_seed(fresh_seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(18, 2))
    x, target = torch.randn(5, 2, 8), torch.randn(5, 2)
    single = F.mse_loss(model(x), target)
    parameters = list(model.parameters())
    InDouble(patches)
    widen(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        out = out.float() + out.to(torch.float32) - out.to("cpu", torch.float32)
        loss = F.mse_loss(out, target)
    loss.backward()
    assert loss.dtype == torch.float64
    assert float(loss.detach()) == pytest.approx(float(single.detach()), rel=1e-4)
    assert all(
        a is b and a.grad is not None and a.grad.dtype == torch.float64
        for a, b in zip(parameters, model.parameters(), strict=True)
    )
    buffer = torch.zeros(2)
    buffer.copy_(out.detach()[0])
    assert buffer.dtype == torch.float32
    assert out.detach().float().dtype == torch.float32


def test_other_batch_sizes_only_for_those_that_are_the_other_runs():
    assert sizes_for([8, 3], seen_on=4, num_ranks=2) == [(8, 16), (3, 6)]
    assert sizes_for([8, 3], seen_on=4, num_ranks=3) is None


def test_torchs_loaders_load_what_they_are_told(patches: Patches):
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    data_set = TensorDataset(torch.arange(12))
    steps = Steps(Plan("", 1, 1, batch_sizes=[(2, 4), (3, 6), (2, 4)]), 0, patches)
    assert [len(x) for (x,) in DataLoader(data_set, 2)] == [4, 4, 4]
    assert [len(x) for (x,) in DataLoader(data_set, batch_size=3, shuffle=True)] == [6, 6]
    batches = BatchSampler(SequentialSampler(data_set), 2, drop_last=False)
    assert len(DataLoader(data_set, batch_sampler=batches)) == 6
    assert len(DataLoader(data_set, batch_size=None)) == 12
    assert [len(x) for (x,) in DataLoader(data_set, 4)] == [4, 4, 4], "the script has seen to it"
    assert [len(x) for (x,) in DataLoader(data_set, 6)] == [6, 6], "there was no fourth loader"
    assert steps._batch_sizes == [2, 3, 4, 6]


def test_what_a_data_set_draws_depends_on_the_sample_alone(patches: Patches):
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return index + torch.rand(())

    same_samples(patches)
    torch.manual_seed(1)
    first = torch.cat(list(DataLoader(Noisy(), batch_size=2)))
    state = torch.get_rng_state()
    second = torch.cat(list(DataLoader(Noisy(), batch_size=4)))
    assert torch.equal(first, second)
    assert not torch.equal(state, torch.get_rng_state()), "the loader itself draws its seed, as ever"


# ---------------------------------------------------------------------- files and words


def test_a_run_survives_its_files(tmp_path):
    plan = Plan(str(tmp_path), 2, 2, False, [[8, 16]], skipped=[3])
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    told = seen(
        rows=[["a"]],
        losses=[(1.0, None), (2.0, 3.0)],
        virtual_ranks=[{"w": "1"}],
        unsynced=["bn"],
        lines={"loss": ("s.py", 3)},
    )
    for rank in range(2):
        write_step(plan, rank, 0, told, {"grad/w": thinned(torch.ones(2, 3))}, {"0": torch.ones(4)})
    run = read_run(tmp_path, 2)
    assert run.ranks == [[told], [told]]
    assert run.num_steps == 1
    assert run.values(0)["grad/w"].tolist() == [1.0] * 6
    assert run.probes(1, 0)["0"].tolist() == [1.0] * 4
    assert run.probes(1, 1) == {}


def test_digests_and_probes():
    tensor = torch.randn(40, 50)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor + 1e-3)
    assert digest(torch.zeros(())) != digest(-torch.zeros(()))
    assert probe(tensor).shape == (NUM_PROBES,)
    assert torch.equal(probe(tensor), probe(tensor.flatten()))
    assert probe(torch.ones(3)).tolist() == [1.0] * 3
    pairs = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert probe(pairs).tolist() == thinned(pairs).tolist() == [1, -2, 3, 4]
    double = torch.ones(3).double()
    kept = probe(double)
    double.zero_()
    assert kept.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("verdict", "word", "text"),
    [
        (Verdict(2, 0.0, None), "identical", "identical bits"),
        (Verdict(2, 3.1e-7, None), "equal", "equal to 3e-07, as expected without reproducible mode"),
        (Verdict(2, 3.1e-7, None, (causes.Cause("random", "masks"),)), "faulty", "equal to 3e-07"),
        (Verdict(2, 1.0, compare.Difference(3, "gradient", "w", 0.5, 1e-6, 2, 4)), "differs", "differs: step 3"),
    ],
)
def test_words(verdict: Verdict, word: str, text: str):
    assert verdict.word == word
    assert verdict.text(is_reproducible=False).startswith(text)
    report = Report("s.py", 5, 1, 0, (verdict,))
    assert report.is_fine == (word in ("identical", "equal"))
    assert f'"verdict": "{word}"' in report.as_json()
