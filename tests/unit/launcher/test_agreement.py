"""What the nodes of a run agree on when an attempt has ended."""

from __future__ import annotations

from evenstep.launcher.elastic.nodes import Saved


def test_all_nodes_decide_alike() -> None:
    """Whatever each of them knows of what was saved."""
    here, elsewhere = Saved(True, 5), Saved(True, 10)
    for each in ([here, elsewhere], [elsewhere, here]):
        assert Saved.of_all_nodes(each) == Saved(True, 10)
    assert Saved.of_all_nodes([Saved(False, None), here]) == here, "one node alone commits checkpoints"
    assert Saved.of_all_nodes([Saved(False, None), Saved(True, None)]) == Saved(True, None)
