"""Data: which loaders are divided over ranks, and how; epochs."""

from __future__ import annotations

import libcst as cst

from evenstep.tools.convert.edits import with_argument
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.source import Node
from evenstep.tools.convert.values import BUILTINS, PASSING, Value, Values, arguments
from evenstep.tools.convert.work import Work

_POSITIONAL = (
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
)
# What doesn't take batches of a loader that it is given.
_PASSED_ON = BUILTINS - {
    "iter",
    "list",
    "tuple",
    "set",
    "sorted",
    "reversed",
    "sum",
    "map",
    "filter",
    "max",
    "min",
    "any",
    "all",
}
_PASSED_ON |= PASSING - {"iter"}
_PERHAPS_ONE = "a batch of one sample can't be divided over ranks: give the DataLoader a batch size"


class Data:
    """The loaders of a script.

    Attributes:
        divided: Those of which each rank gets a part.
    """

    def __init__(self, work: Work, loops: Loops, trained: Values) -> None:
        self._work, self._loops, self._trained = work, loops, trained
        self._script, self._flow = work.script, work.flow
        self.training = {value for loop in loops.training for value in loops.loaders(loop)}
        sites = [site for each in loops.passes for site in loops.taken_from(each.loss)]
        self.training |= {value for site in sites for value in self._flow.loaders(site)}
        self.divided: Values = frozenset()

    def divide(self) -> None:
        """Have the loaders that are trained on divided over ranks, and those of evaluations where that is exact."""
        divided = {value for value in self.training if self._change(value, is_training=True)}
        found = {value for loop in self._loops.evaluating for value in self._loops.loaders(loop)} - self.training
        for value in sorted(found, key=lambda value: self._script.order(value.site)):
            reason = next((f"{why} (line {self._script.line(at)})" for at, why in self._whole(value)), None)
            if reason is None and self._change(value, is_training=False):
                divided.add(value)
            elif reason is not None:
                self._work.note(value.site, f"every rank evaluates all of this: {reason}", mark=True)
        self.divided = frozenset(divided)
        for value in sorted(self.training, key=lambda value: self._script.order(value.site)):
            for place, why in self._whole(value):
                self._show_whole(place, value, why)

    def _whole(self, value: Value) -> list[tuple[Node, str]]:
        """Where a script needs whole batches of a loader, not to train on them, and why."""
        script, flow = self._script, self._flow
        found: list[tuple[Node, str]] = []
        for loop in self._loops.evaluating:
            reason = self._loops.why_whole(loop, self._trained) if value in self._loops.loaders(loop) else None
            if reason is not None:
                found.append((loop.iter, reason))
        for call in self._work.calls():
            given = [argument.value for argument in call.args if value in flow.loaders(argument.value)]
            is_own = any(each.kind in ("function", "class") for each in flow.of(call.func))
            short = script.code(call.func).rsplit(".", 1)[-1]
            if not given or is_own or short in _PASSED_ON or (short == "iter" and not self._is_look(call)):
                continue
            found.append((given[0], f"{short}(...) takes whole batches"))
        return found

    def _is_look(self, call: cst.Call) -> bool:
        """Whether what `iter` gives is only looked at: its batches aren't those of a training loop."""
        script = self._script
        nexts = [each for each in self._work.calls() if script.code(each.func) == "next" and each.args]
        own = [each for each in nexts if script.is_inside(call, each)]
        targets = [each.target for assign in script.ancestors(call) for each in getattr(assign, "targets", ())]
        own = own or [each for each in nexts if script.code(each.args[0].value) in map(script.code, targets)]
        return bool(own) and not any(self._loops.at(each) & self._loops.training for each in own)

    def _show_whole(self, place: Node, value: Value, why: str) -> None:
        """Have a look at a loader that is divided be one at whole batches, on every rank the same."""
        work, script, call = self._work, self._script, value.site
        assert isinstance(call, cst.Call)
        given = arguments(call, _POSITIONAL)
        kept = {name: script.code(given[name].value) for name in ("shuffle", "drop_last") if name in given}
        line, names = script.line(place), {"dataset", "batch_size", "num_workers", "pin_memory", *kept}
        holders = [each for each in script.inside(place) if self._flow.of(each, "loader") == {value}]
        if set(given) <= names and {*kept.values()} <= {"True", "False"} and holders:
            rest = "".join(f", {name}={text}" for name, text in kept.items())
            whole = f"{script.code(call.func)}({{old}}.dataset, {{old}}.global_batch_size{rest})"
            work.edits.template(holders[0], whole)
            self._loops.whole.add(holders[0])
            work.note(place, f"every rank sees all of this: {why}", mark=True)
        else:
            text = (
                f"{why}, of a loader that is trained on, and a rank would see its part: make a second DataLoader for it"
            )
            work.refuse(place, f"{text} (line {line})")

    # ------------------------------------------------------------------ loaders

    def _change(self, value: Value, *, is_training: bool) -> bool:
        call = value.site
        assert isinstance(call, cst.Call)
        given = arguments(call, _POSITIONAL)
        problem = self._problem(call, given)
        if problem is not None:
            if is_training:
                self._work.refuse(call, problem)
            else:
                self._work.note(call, f"every rank evaluates all of this: {problem}", mark=True)
            return False
        self._change_loader(call, given)
        return True

    def _problem(self, call: cst.Call, given: dict[str, cst.Arg]) -> str | None:
        script = self._script
        unseen = self._work.unseen(call, "batch_size=..., shuffle=...")
        if unseen is not None:
            return unseen
        size = given.get("batch_size")
        if "batch_sampler" not in given and (size is None or script.code(size.value) in ("1", "None")):
            return _PERHAPS_ONE
        return None

    def _change_loader(self, call: cst.Call, given: dict[str, cst.Arg]) -> None:
        work, edits = self._work, self._work.edits
        edits.template(call.func, "evenstep.DataLoader")
        if "generator" in given:
            work.note(call, "generator= was left out: the loader's order follows from its seed")
        seeds = [each.func for each in work.seeds(are_numbers=False) if isinstance(each.func, cst.Attribute)]
        seed = f"{self._script.code(seeds[0].value)}.initial_seed()" if seeds else None
        order = {id(given[name]): name for name in given}

        def change(updated: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(updated, cst.Call)
            kept: list[cst.Arg] = []
            for argument, new in zip(call.args, updated.args, strict=True):
                name = order.get(id(argument), "")
                if name in ("generator", "in_order"):
                    continue
                if name == "batch_size":
                    new = _named(new, "global_batch_size") if argument.keyword is not None or len(kept) != 1 else new
                elif argument.keyword is None and name not in ("dataset", "shuffle"):
                    new = _named(new, name)
                kept.append(new)
            if kept and kept[-1] is not updated.args[-1]:
                kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
            updated = updated.with_changes(args=kept)
            return with_argument("seed", seed)(updated) if seed else updated

        edits.change(call, change)

    # ------------------------------------------------------------------ what is asked of loaders

    def change_uses(self) -> None:
        """Change what is read of loaders that were divided."""
        script, edits = self._script, self._work.edits
        for node in script.nodes:
            held = self._flow.of(node.value, "loader") if isinstance(node, cst.Attribute) else frozenset()
            if not held or not held <= self.divided:
                continue
            assert isinstance(node, cst.Attribute)
            call = script.parent(script.parent(node) or node)
            has_own = any(
                "sampler" in arguments(each.site, _POSITIONAL) for each in held if isinstance(each.site, cst.Call)
            )
            is_length = isinstance(call, cst.Call) and script.code(call.func) == "len"
            if node.attr.value == "sampler" and is_length and not has_own:
                edits.change(node, lambda new: new.with_changes(attr=cst.Name("dataset")))
            if node.attr.value == "batch_size":
                edits.change(node, lambda new: new.with_changes(attr=cst.Name("global_batch_size")))


_EQUAL = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))


def _named(argument: cst.Arg, name: str) -> cst.Arg:
    equal = argument.equal if isinstance(argument.equal, cst.AssignEqual) else _EQUAL
    return argument.with_changes(keyword=cst.Name(name), equal=equal)
