"""The page of a rank's random streams: what others read after its death is what it had at that step."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from evenstep import randomness
from evenstep.checkpoint.save import stream_page
from evenstep.checkpoint.save.stream_page import StreamPage, read_streams
from evenstep.randomness import RandomState

DRAWS = {
    "nothing": lambda: None,
    "python": lambda: random.random(),
    "python's normal numbers, which come in pairs": lambda: random.gauss(0, 1),
    "torch": lambda: torch.rand(3),
    "numpy": lambda: numpy.random.random(),
    "numpy's normal numbers, which come in pairs": lambda: numpy.random.randn(),
    "a new seed for all": lambda: randomness.seed_everything(random.randrange(1 << 30)),
}


def assert_same(ours: RandomState, theirs: RandomState) -> None:
    """Every stream."""
    assert ours.python == theirs.python
    assert torch.equal(ours.torch_cpu, theirs.torch_cpu)
    assert ours.numpy is not None
    assert theirs.numpy is not None
    assert ours.numpy[0] == theirs.numpy[0]
    assert (ours.numpy[1] == theirs.numpy[1]).all()
    assert ours.numpy[2:4] == theirs.numpy[2:4]
    assert not theirs.numpy[3] or ours.numpy[4] == theirs.numpy[4]


def test_the_last_steps_are_read_as_they_were_whatever_was_drawn(tmp_path: Path, fresh_seed: int) -> None:
    with randomness.preserved():
        randomness.seed_everything(fresh_seed)
        draw = random.Random(fresh_seed)
        page = StreamPage(tmp_path / "page")
        written = []
        for step in range(300):
            for _ in range(draw.choice([0, 1, 1, 700])):
                DRAWS[draw.choice(list(DRAWS))]()
            has_diverged = draw.random() < 0.5
            page.write(step, has_diverged=has_diverged)
            written.append((randomness.capture(), has_diverged))
            for before in range(max(0, step - 5), step + 1):
                found = read_streams(tmp_path / "page", before)
                assert found is not None, (step, before)
                assert_same(found[0], written[before][0])
                assert found[1] is written[before][1]
            assert read_streams(tmp_path / "page", step - 6) is None
        page.close()


def test_of_two_entries_of_one_step_the_later_counts(tmp_path: Path) -> None:
    with randomness.preserved():
        page = StreamPage(tmp_path / "page")
        page.write(7, has_diverged=False)
        torch.rand(1)
        page.write(7, has_diverged=False)
        found = read_streams(tmp_path / "page", 7)
        assert found is not None
        assert torch.equal(found[0].torch_cpu, torch.get_rng_state())
        page.close()


@pytest.mark.parametrize("num_windows", [1, 2, 5])
def test_a_step_of_several_windows_leaves_those_before_it(tmp_path: Path, num_windows: int) -> None:
    """As of a generator and its critic: each window of a step writes it anew, and a peer may need the step before."""
    with randomness.preserved():
        page = StreamPage(tmp_path / "page")
        of_step = {}
        for step in range(1, 9):
            for _ in range(num_windows + 1):
                torch.rand(1)
                page.write(step, has_diverged=False)
                of_step[step] = randomness.capture()
                for before in range(max(1, step - 2), step + 1):
                    found = read_streams(tmp_path / "page", before)
                    assert found is not None, (step, before)
                    assert_same(found[0], of_step[before])
        page.close()


def test_a_rank_that_dies_while_it_writes_leaves_the_entries_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        """As if by SIGKILL, between two stores."""

    with randomness.preserved():
        page = StreamPage(tmp_path / "page")
        for step in range(9):
            torch.rand(1)
            page.write(step, has_diverged=False)
        before = randomness.capture()
        torch.rand(1)
        store = stream_page._NUMBER

        class Dies:
            """Clears the number, and comes no further."""

            calls = 0

            def pack_into(self, *args: object) -> None:
                self.calls += 1
                if self.calls == 2:
                    raise Killed
                store.pack_into(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(stream_page, "_NUMBER", Dies())
        with pytest.raises(Killed):
            page.write(9, has_diverged=False)
        assert read_streams(tmp_path / "page", 9) is None
        found = read_streams(tmp_path / "page", 8)
        assert found is not None
        assert_same(found[0], before)
        page.close()


def test_no_page_and_what_is_none_have_no_streams(tmp_path: Path) -> None:
    assert read_streams(tmp_path / "page", 1) is None
    (tmp_path / "page").write_bytes(b"1234")
    assert read_streams(tmp_path / "page", 1) is None


def test_another_generator_of_numpys_is_not_kept(tmp_path: Path) -> None:
    before = numpy.random.get_bit_generator()
    page = StreamPage(tmp_path / "page")
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        page.write(1, has_diverged=False)
        assert read_streams(tmp_path / "page", 1) is None
    finally:
        numpy.random.set_bit_generator(before)
    page.write(2, has_diverged=False)
    assert read_streams(tmp_path / "page", 2) is not None
    page.close()
