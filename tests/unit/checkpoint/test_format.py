"""What stands in a checkpoint's files: state dictionaries, safetensors payloads, the manifest, plans, the storage."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
import typing
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.payload import Entry, bytes_of, parse_header, plan_layout
from evenstep.checkpoint.format.plan import Policy, best_step, plan_files, plan_removals
from evenstep.checkpoint.format.random_streams import capture_streams, restore_streams
from evenstep.checkpoint.format.tree import flatten, unflatten
from evenstep.checkpoint.save.snapshot import File, Staging, capture_one
from evenstep.errors import ConfigurationError
from evenstep.ground.computing import randomness
from tests.stub_worlds import stub_world

# ---------------------------------------------------------------------- random streams


def initialised(rank, num_ranks):
    """A rank's world as `evenstep.init` makes it; the streams of others are their script's."""
    world = stub_world(rank, num_ranks)
    world._init_arguments = {}
    return world


def streams_of(num_ranks, seed, has_diverged, *, reseeded=False):
    """What the ranks of a run would save; `reseeded`: the script has seeded python's stream on all of them again."""
    saved = []
    for rank in range(num_ranks):
        randomness.seed_everything(seed)
        if has_diverged:
            randomness.diverge(rank)
        if reseeded:
            random.seed(seed)
        world = initialised(rank, num_ranks)
        world.has_diverged = has_diverged
        saved.append(there_and_back(capture_streams(world)))
    return saved


def drawn_after(saved, num_ranks):
    drawn, flags = [], []
    for rank in range(num_ranks):
        world = initialised(rank, num_ranks)
        restore_streams(saved, world)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
        flags.append(world.has_diverged)
    return list(zip(*drawn, strict=True)), flags


@pytest.mark.parametrize("num_saved", [1, 2, 3])
@pytest.mark.parametrize("has_diverged", [True, False])
def test_a_new_rank_draws_its_own_numbers_where_ranks_did(fresh_seed, num_saved, has_diverged):
    with randomness.preserved():
        drawn, flags = drawn_after(streams_of(num_saved, fresh_seed, has_diverged), 5)
        randomness.seed_everything(fresh_seed)
        first = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    assert flags == [has_diverged] * 5
    assert [len(set(numbers)) for numbers in drawn] == [5 if has_diverged else 1] * 3
    assert tuple(numbers[0] for numbers in drawn) == first


def test_a_new_rank_shares_what_all_ranks_shared(fresh_seed):
    with randomness.preserved():
        drawn, _ = drawn_after(streams_of(2, fresh_seed, True, reseeded=True), 5)
    assert [len(set(numbers)) for numbers in drawn] == [1, 5, 5]


def test_streams_come_back_exactly_and_travel_in_four_bytes_a_word(fresh_seed):
    with randomness.preserved():
        randomness.seed_everything(fresh_seed)
        random.gauss(0, 1), numpy.random.randn(), torch.rand(3)  # half of a pair is kept by the first two
        saved, world = capture_streams(initialised(0, 1)), initialised(0, 1)
        assert [saved[name]["words"].nbytes for name in ("python", "numpy")] == [4 * 625, 4 * 624]
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        randomness.seed_everything(fresh_seed + 1)
        restore_streams([there_and_back(saved)], world)
        after = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    assert after[0] == before[0]
    assert str(after[1]) == str(before[1])
    assert (after[1][1] == before[1][1]).all()
    assert torch.equal(after[2], before[2])


# ---------------------------------------------------------------------- state dictionaries


def there_and_back(state):
    structure, tensors = flatten(state, "thing")
    return unflatten(json.loads(json.dumps(structure)), tensors)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()
STATES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


@given(STATES)
@settings(deadline=None)
def test_plain_data_comes_back_as_it_was(state):
    assert there_and_back(state) == state


def test_types_that_schedulers_and_optimizers_keep_come_back():
    state = {
        0: {"a.b": torch.arange(3), "a": {"b": torch.tensor(1.5)}},
        "~tensor": "a key that looks like a mark",
        "milestones": collections.Counter({3: 2, 5: 1}),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "array": numpy.arange(4, dtype=numpy.int16),
        "number": numpy.float64(0.1),
        "small": numpy.float16(0.1),
        "yes": numpy.bool_(True),
        "zero": numpy.array(3),
        "ordered": collections.OrderedDict([("b", 1), ("a", (2.0, {1: True}))]),
        "odd keys": collections.OrderedDict([(2, "x"), ((1, None), "y")]),
        "worst": math.inf,
    }
    back = there_and_back(state)
    assert torch.equal(back[0]["a.b"], torch.arange(3))
    assert back[0]["a"]["b"] == 1.5
    assert back["~tensor"] == state["~tensor"]
    assert back["milestones"] == state["milestones"]
    assert list(back["milestones"].elements()) == [3, 3, 5]
    for key in ("size", "number", "small", "yes", "zero", "ordered", "odd keys", "milestones"):
        assert back[key] == state[key]
        assert type(back[key]) is type(state[key]), key
    assert list(back["ordered"]) == ["b", "a"]
    assert back["dtype"] is torch.bfloat16
    assert back["array"].dtype == numpy.int16
    assert back["worst"] == math.inf
    assert math.isnan(there_and_back({"x": math.nan})["x"])


class Word(str, enum.Enum):
    YES = "yes"


class Point(typing.NamedTuple):
    x: int
    y: int


class Odd:
    def __repr__(self):
        return "odd"


ENDLESS: dict[str, object] = {}
ENDLESS["self"] = ENDLESS


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (ENDLESS, "contains itself"),
        (
            {"a": [1, {"b": Odd()}]},
            r"thing\['a'\]\[1\]\['b'\] is a .*Odd, which can't be saved, because checkpoints contain no pickle",
        ),
        ({"f": print}, r"thing\['f'\] is a builtins.builtin_function_or_method"),
        ({"s": {1, 2}}, r"thing\['s'\] is a builtins.set"),
        ({Odd(): 1}, "has the key odd of type Odd"),
        ({"t": torch.eye(2).to_sparse()}, r"thing\['t'\] is a torch.sparse_coo tensor"),
        ({"n": numpy.arange(3, dtype=">i4")}, r"thing\['n'\] is a numpy array of dtype >i4"),
        ({"text": "\ud83d\ude00"}, r"thing\['text'\] is a text with half of a character"),
        ({1: {"\ud83d": torch.ones(3)}}, "is a text with half of a character"),
        ({"s": numpy.str_("a")}, r"thing\['s'\] is a numpy.str_"),
        ({"p": Point(1, 2)}, r"thing\['p'\] is a .*Point"),
        ({"d": collections.defaultdict(list)}, r"thing\['d'\] is a collections.defaultdict"),
        ({"m": numpy.ma.array([1], mask=[1])}, r"thing\['m'\] is a numpy.ma.*MaskedArray"),
        ({Word.YES: 1}, r"Word.YES.* is a .*Word, which can't be saved"),
        ({(torch.ones(1), 2): 1}, "contains a tensor or a numpy number"),
        ({"a": {numpy.float64(2): 1}}, "contains a tensor or a numpy number"),
        ({"t": torch.empty(2, device="meta")}, r"thing\['t'\] is a torch.float32 tensor on meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path_and_type(state, message):
    with pytest.raises(ConfigurationError, match=message):
        flatten(state, "thing")


def test_what_earlier_versions_have_saved_is_read():
    """Sizes as tuples, numbers of numpy's as arrays, ordered dictionaries as plain ones."""
    structure = {"size": {"~tuple": [1, 2]}, "n": {"~array": "n"}, "d": {"~dict": [[1, {"a": 2}]]}}
    assert unflatten(structure, {"n": torch.tensor(2)}) == {"size": (1, 2), "n": 2, "d": {1: {"a": 2}}}


def test_a_conjugate_is_no_twin():
    values = torch.randn(3, dtype=torch.complex64)
    for view in (values.conj(), values.conj().imag):  # one with torch's flag for conjugates, one with that for signs
        twin = values if view.is_complex() else values.imag
        captured = capture_one("thing", {"a": twin, "b": view})
        assert captured.aliases == {}
        layout = plan_layout(captured.entries)
        [staged] = Staging().stage([File("f", "it", layout, captured.tensors)])
        stored = {key: torch.frombuffer(bytes_of(each), dtype=twin.dtype) for key, each in staged.tensors.items()}
        assert torch.equal(stored["a"], twin)
        assert torch.equal(stored["b"], view)


# ---------------------------------------------------------------------- payloads


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    layout = plan_layout([capture_entry(key, tensor) for key, tensor in tensors.items()], {"format": "pt"})
    with path.open("wb") as file:
        file.write(layout.header)
        for entry in layout.entries:
            file.write(bytes_of(tensors[entry.key].contiguous()))
    assert path.stat().st_size == layout.file_bytes


def capture_entry(key: str, tensor: torch.Tensor) -> Entry:
    return Entry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def test_the_safetensors_package_reads_every_dtype(tmp_path: Path):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    dtypes += [torch.uint16, torch.uint32, torch.uint64]
    tensors = {}
    for index, dtype in enumerate(dtypes):
        for shape in ((), (0,), (3,), (2, index + 1)):
            raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
            tensors[f"{dtype}-{list(shape)}"] = (
                raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
            )
    write(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype
        assert back[key].shape == tensor.shape
        assert bytes(bytes_of(back[key].contiguous())) == bytes(bytes_of(tensor.contiguous())), key


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("a"),
        lambda h: h["a"].update(dtype="F64"),
        lambda h: h["a"].update(shape=[4, 1]),
        lambda h: h["a"].update(data_offsets=[0, 10**12]),
        lambda h: h["a"].update(data_offsets=[-4, 12]),
        lambda h: h["a"].update(data_offsets="all"),
    ],
)
def test_a_header_that_says_something_else_is_refused(change):
    entries = [Entry("a", "float32", (4,)), Entry("b", "int8", (3,))]
    layout = plan_layout(entries)
    assert parse_header(layout.header[8:], entries, 19) == {"a": 0, "b": 16}
    header = json.loads(layout.header[8:])
    change(header)
    with pytest.raises(ValueError, match="header"):
        parse_header(json.dumps(header).encode(), entries, 19)


def test_a_file_may_hold_more_than_is_listed():
    """A buffer of which each node had another value: the manifest lists the first node's alone."""
    layout = plan_layout([Entry("a", "float32", (4,)), Entry("b", "int8", (3,))])
    assert parse_header(layout.header[8:], [Entry("b", "int8", (3,))], 19) == {"b": 16}


# ---------------------------------------------------------------------- the manifest


def some_manifest(**changes) -> manifests.Manifest:
    part = manifests.Part("model.safetensors", "w", 0, 4, 7)
    entry = manifests.ObjectEntry(
        "Linear", {"w": {"~tensor": "w"}}, {"w": manifests.TensorEntry("float32", (4,), (part,))}
    )
    values = {
        "step": 3,
        "world_size": 2,
        "time": 1.5,
        "versions": {"torch": "2"},
        "metrics": {"loss": math.inf},
        "objects": {"model": entry},
        "files": {"model.safetensors": manifests.FileEntry(80, 64, 9)},
    }
    return manifests.Manifest(**{**values, **changes})


def with_copies() -> manifests.Manifest:
    """Two parts of a tensor, each on two nodes."""
    names = [f"model-n{node}.safetensors" for node in range(3)]
    parts = [manifests.Part(names[0], "w.0", 0, 1, 7), manifests.Part(names[1], "w.1", 1, 3, 8)]
    copies = [replace(parts[0], file=names[1], key="w.9"), replace(parts[1], file=names[2])]
    entry = manifests.TensorEntry("float32", (4,), tuple(parts), tuple(copies))
    return some_manifest(
        objects={"model": manifests.ObjectEntry("Linear", {"w": {"~tensor": "w"}}, {"w": entry})},
        files={name: manifests.FileEntry(80, 64, 9, node) for node, name in enumerate(names)},
    )


@pytest.mark.parametrize("changes", [{"start": 2}, {"numel": 2}, {"crc32": 7}, {"sizes": (3,)}, {"file": "other"}])
def test_a_copy_of_no_part_is_refused(changes):
    manifest = with_copies()
    tensor = manifest.objects["model"].tensors["w"]
    wrong = replace(tensor, copies=(tensor.copies[0], replace(tensor.copies[1], **changes)))
    content = manifests.encode(
        replace(manifest, objects={"model": replace(manifest.objects["model"], tensors={"w": wrong})})
    )
    with pytest.raises(ValueError, match=r"matches none of its parts|isn't listed"):
        manifests.decode(content)


def test_every_flipped_bit_and_every_truncation_of_a_manifest_is_found():
    content = manifests.encode(with_copies())
    assert manifests.decode(content) == with_copies()
    for position in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match=r"checksum|first line|version"):
            manifests.decode(bytes(flipped))
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"checksum|first line"):
            manifests.decode(content[:length])


def resealed(**changes) -> bytes:
    """A manifest by somebody who means harm: changed, with the right checksum."""
    rest = json.loads(manifests.encode(some_manifest()))
    del rest["evenstep_checkpoint"], rest["crc32"]
    rest.update(changes)
    body = json.dumps(rest)[1:].encode()
    return b'{"evenstep_checkpoint": 1, "crc32": "%08x",\n' % zlib.crc32(body) + body


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b", "manifest.json"]
)
def test_names_that_leave_the_folder_are_refused(name):
    with pytest.raises(ValueError, match="isn't a plain name"):
        manifests.decode(resealed(files={name: {"bytes": 1, "header_bytes": 1, "header_crc32": 1}}))


def test_a_manifest_that_asks_for_too_much_is_refused():
    def with_tensor(**changes):
        part = {"file": "model.safetensors", "key": "w", "start": 0, "numel": 4, "crc32": 7, **changes.pop("part", {})}
        tensor = {"dtype": "float32", "shape": [4], "parts": [part], **changes}
        item = {"kind": "x", "structure": {}, "tensors": {"w": tensor}, "aliases": {}, "placed": []}
        return resealed(objects={"model": item})

    manifests.decode(with_tensor())
    for changes, message in [
        ({"shape": [10**9], "part": {"numel": 10**9}}, "larger than its file"),
        ({"shape": [5]}, "don't make up"),
        ({"part": {"start": 1}}, "don't make up"),
        ({"shape": [-4]}, "a whole number"),
        ({"dtype": "object"}, "dtype 'object'"),
        ({"part": {"file": "other"}}, "isn't listed"),
        ({"shape": None}, "lacks something"),
    ]:
        with pytest.raises(ValueError, match=message):
            manifests.decode(with_tensor(**changes))


# ---------------------------------------------------------------------- plans


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 40_000_000), max_size=6), max_size=4),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_every_tensor_is_written_once_by_one_rank(sizes, world_size):
    objects = {
        owner: [Entry(f"{owner}{i}", "uint8", (numel,)) for i, numel in enumerate(numels)]
        for owner, numels in sizes.items()
    }
    files = plan_files(objects, world_size)
    assert len({file.name for file in files}) == len(files)
    assert all(0 <= file.rank < world_size for file in files)
    for owner, entries in objects.items():
        written = [entry for file in files if file.owner == owner for entry in file.entries]
        assert sorted(written, key=lambda e: e.key) == sorted(entries, key=lambda e: e.key)
    load = [sum(e.num_bytes for f in files if f.rank == rank for e in f.entries) for rank in range(world_size)]
    largest = max((e.num_bytes for f in files for e in f.entries), default=0)
    assert max(load) - min(load) <= max(largest, 16 << 20), "nobody writes much more than another"


def test_what_is_kept():
    metrics = {step: {"loss": abs(step - 35) / 10} for step in range(10, 101, 10)}
    assert plan_removals(metrics, Policy(keep=2)) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert plan_removals(metrics, Policy(keep=1, keep_every=50)) == [10, 20, 30, 40, 60, 70, 80, 90]
    assert plan_removals(metrics, Policy(keep=1, best="loss")) == [10, 20, 40, 50, 60, 70, 80, 90]
    assert best_step(metrics, Policy(best="loss", best_is="highest")) == 100
    assert best_step({1: {"loss": math.nan}, 2: {}}, Policy(best="loss")) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0"),
        ({"every_steps": 1.5}, "every_steps=1.5"),
        ({"every_steps": True}, "every_steps=True"),
        ({"every_minutes": 0}, "every_minutes=0"),
        ({"every_minutes": "5"}, "every_minutes='5'"),
        ({"best": 3}, "best=3"),
        ({"best_is": "min"}, "best_is='min'"),
    ],
)
def test_policies_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Policy(**arguments)


# ---------------------------------------------------------------------- memory


def test_the_bytes_of_a_tensor_keep_it_alive() -> None:
    tensor = torch.full((100_000,), 7, dtype=torch.uint8)
    itself = weakref.ref(tensor)
    memory = bytes_of(tensor)
    del tensor
    assert itself() is not None
    assert bytes(memory[:3]) == b"\x07\x07\x07"
    del memory
    assert itself() is None
