"""Findings: what was read and what was seen become one list."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("libcst")

from evenstep.tools.doctor.findings import Watched, merge
from evenstep.tools.doctor.rule import GROUPS, Finding, Refuted
from evenstep.tools.doctor.rules import all_rules

READ = Finding("train.py", 12, 5, "DataLoader(train_set) has no sampler", rule="EV101")


def test_a_rules_group_and_page_follow_from_its_id():
    rules = all_rules()
    assert len({rule.name for rule in rules.values()}) == len(rules) >= 37
    for key, rule in rules.items():
        assert key == rule.id
        assert GROUPS[rule.group] == key[2]
        assert rule.explain == f"evenstep doctor --explain {rule.id}"
        assert rule.what.endswith(".")
        assert rule.why.endswith(".")
        assert rule.mend
    assert {rule.group for rule in rules.values()} == set(GROUPS)


def test_a_seen_finding_confirms_the_one_that_was_read():
    seen = replace(READ, column=1, evidence="both ranks saw 3fa1", cost="2 times", confirmed=True)
    (merged,) = merge([READ], Watched([seen]))
    assert merged.confirmed
    assert merged.column == 5
    assert merged.evidence == "DataLoader(train_set) has no sampler; both ranks saw 3fa1"
    assert merged.cost == "2 times"


def test_what_a_run_alone_has_seen_is_added_in_order():
    other = replace(READ, line=3, confirmed=True)
    found = merge([READ, replace(READ, line=20)], Watched([other, replace(other, rule="EV109", line=40)]))
    assert [(each.rule, each.line, each.confirmed) for each in found] == [
        ("EV101", 3, True),
        ("EV101", 12, False),
        ("EV101", 20, False),
        ("EV109", 40, True),
    ]


def test_what_a_run_refutes_is_no_finding():
    assert merge([READ], Watched(refuted=[Refuted("EV101")])) == []
    assert merge([READ], Watched(refuted=[Refuted("EV102")])) == [READ]
