"""`evenstep verify`, the parts that decide: what is rounding, what is not, and why."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.tools.observing.changes import same_samples
from evenstep.tools.observing.patching import Patches
from evenstep.tools.verify import causes, compare
from evenstep.tools.verify.causes import find_weights
from evenstep.tools.verify.double import InDouble, widen
from evenstep.tools.verify.evidence import Run, Seen
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


def test_a_missing_gradient_another_one_and_nan_differ(exact):
    base, reference = a_run(seen(), values=noisy(exact, 1e-7)), a_run(seen(), values=exact)
    without = {name: value for name, value in exact.items() if name != "grad/b"}
    with_nan = {**exact, "param/a": exact["param/a"] * math.nan}
    with_another = {**exact, "grad/c": torch.ones(3)}
    for values, name in ((without, "b"), (with_nan, "a"), (with_another, "c")):
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
    assert found.rounding < found.deviation, "the limit is that of the float64 runs"


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
    assert "virtual rank 2: gradient of 'a' differs in its bits" in str(found)


def test_the_loss_is_weighed_like_the_gradient():
    assert compare.loss_of([seen(losses=[(1.0, None), (2.0, None)]), seen(losses=[(3.0, None), (4.0, None)])]) == 5.0
    weighed = [seen(losses=[(1.0, 3.0), (math.nan, 0.0)]), seen(losses=[(5.0, 1.0)])]
    assert compare.loss_of(weighed) == 2.0
    of_two_windows = [seen(losses=[(1.0, 1.0), (8.0, 0.5)], windows=[0, 1]) for _ in range(2)]
    assert compare.loss_of(of_two_windows) == 9.0, "whose weights have scales of their own"


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
    assert f"rank 0 by 0.25 instead of {right[0] / sum(right):.4g}" in text


def test_batch_norm_is_blamed_only_where_no_weights_explain_the_difference():
    base, run = of_passes([0.5, 0.5], [0.5, 0.5], foreign=0.1)
    for each in run.at(0):
        each.unsynced = ["1"]
    assert kinds(base, run) == ["batch norm"]
    base, run = of_passes([0.7, 0.3], [0.5, 0.5])
    for each in run.at(0):
        each.unsynced = ["1"]
    assert kinds(base, run) == ["average"]


def test_statistics_of_several_passes_are_blamed_before_the_loss():
    base, run = of_passes([0.5, 0.5], [0.5, 0.5], foreign=0.1)
    for each in run.at(0):
        each.synced, each.losses, each.virtual_ranks = ["bn1"], [(1.0, None)] * 4, [{"grad/a": "digest"}]
    text = causes.find_causes(base, run, 0, rounding=1e-12)[0].text
    assert "batch normalisation over micro-batches: 'bn1'" in text
    assert "a step has 4 passes" in text


def data(*ranks: list[str]) -> Run:
    return a_run(*(seen(rows=[rows]) for rows in ranks))


@pytest.mark.parametrize(
    ("ranks", "kind", "told"),
    [
        ((["a", "b"], ["a", "b"]), "repeated", "2 of the 4 samples of 2 ranks are repetitions (rank 1 saw 2 of rank 0"),
        ((["a", "b"], ["c"]), "samples", "4 samples on 1, 3 on 2"),
        ((["a", "b"], ["c", "e"]), "samples", "1 of 4 samples are not among those of 1 rank"),
    ],
)
def test_samples(ranks, kind, told):
    found = causes.find_causes(data(["a", "b", "c", "d"]), data(*ranks), 0, rounding=1e-12)
    assert found[0].kind == kind
    assert told in found[0].text


def test_what_torchs_sampler_repeats_at_the_end_is_no_random_number():
    rows = [[["a", "b"], ["c"]], [["a"], ["c"]], [["b"], ["a"]]]  # one rank, then two ranks, by step
    base, run = (
        Run(
            [[seen(rows=[each], loaded=each) for each in steps] for steps in of], lambda step: {}, lambda rank, step: {}
        )
        for of in (rows[:1], rows[1:])
    )
    (found,) = causes.find_causes(base, run, 1, rounding=1e-12)
    assert "torch's DistributedSampler has filled up its last batch: 1 sample of 2 ranks came twice" in found.text
    assert found.is_note


def test_a_cause_is_named_alone():
    """Of batch norm's statistics and random numbers nothing is known where the samples are others."""
    base = a_run(seen(rows=[["a", "b"]]))
    run = a_run(*(seen(rows=[["a"]], unsynced=["1"], draws=True, settings=[{"lr": 2.0}]) for _ in range(2)))
    assert kinds(base, run) == ["repeated"]


def test_equal_samples_in_a_data_set_are_no_repetition():
    assert kinds(data(["a", "a", "b"]), data(["b", "a"], ["a"])) == []


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
        f = 1

    class Derived(Base):
        pass

    for factor in (2, 10):
        patches.replace(Derived, "f", lambda original, factor=factor: original * factor)
    assert Derived.f == 20
    patches.restore()
    assert vars(Derived).get("f") is None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
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
