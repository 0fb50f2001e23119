"""Data: which loaders are divided over ranks, and how; epochs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import libcst as cst

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.metrics import Metrics
from evenstep.tools.reading.tree import Node
from evenstep.tools.reading.values import BUILTINS, PASSING, Value, Values, arguments

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
_LEFT_OUT = {"generator", "in_order"}
_CHANGED = _LEFT_OUT | {"batch_size"}
# What doesn't take batches of a loader that it is given.
_TAKING = {"list", "tuple", "set", "sorted", "reversed", "sum", "map", "filter", "max", "min", "any", "all"}
_PASSED_ON = (BUILTINS | PASSING) - _TAKING - {"iter"}
_PERHAPS_ONE = "a batch of one sample can't be divided over ranks: give the DataLoader a batch size"


class Data:
    """The loaders of a script.

    Attributes:
        divided: Those of which each rank gets a part.
    """

    def __init__(self, work: Work, loops: Loops, metrics: Metrics) -> None:
        self._work, self._loops, self._metrics = work, loops, metrics
        self._script, self._flow = work.script, work.flow
        self.divided: Values = frozenset()

    def divide(self) -> None:
        """Have the loaders that are trained on divided over ranks, and those of evaluations where that is exact."""
        loops, order = self._loops, lambda value: self._script.order(value.site)
        sites = [site for each in loops.passes for site in loops.taken_from(each.loss)]
        training = {value for loop in loops.training for value in loops.loaders(loop)}
        training |= {value for site in sites for value in self._flow.loaders(site)}
        divided: set[Value] = set()
        for value in sorted(training, key=order):
            problem = self._problem(_call(value))
            if problem is None:
                divided.add(value)
            else:
                self._work.refuse(value.site, problem)
        for value in sorted({each for loop in loops.evaluating for each in loops.loaders(loop)} - training, key=order):
            reasons = [f"{why} (line {self._script.line(at)})" for at, why in self._whole(value)]
            problem = next(iter(reasons), None) or self._problem(_call(value))
            if problem is None:
                divided.add(value)
            else:
                self._work.note(value.site, f"every rank evaluates all of this: {problem}", mark=True)
        for value in sorted(divided, key=order):
            self._change_loader(_call(value))
        for value in sorted(training, key=order):
            for place, why in self._whole(value):
                self._show_whole(place, value, why)
        self.divided = frozenset(divided)

    def _problem(self, call: cst.Call) -> str | None:
        """Why a loader can't be divided."""
        given = self._work.arguments(call, _POSITIONAL)
        own = arguments(call, _POSITIONAL)
        wanted = [f"{name}=..." for name in ("batch_size", "shuffle") if name not in own]
        unseen = self._work.unseen(call, ", ".join(wanted), _CHANGED, written_out=True)
        size = given.get("batch_size")
        if unseen is None and "batch_sampler" not in given:
            if size is None or self._script.code(size.value) in ("1", "None"):
                return _PERHAPS_ONE
            option = self._option_of_one(size.value)
            if option is not None:
                text = f"{option} is 1 unless something else is given, and a batch of one sample can't be divided"
                self._work.note(call, text, mark=True)
        return unseen

    def _option_of_one(self, size: Node) -> str | None:
        """What a batch size is taken from if it is 1 unless something else is given."""
        script = self._script
        nodes = [each for each in self._work.losses.slice(size) if isinstance(each, cst.Name | cst.Attribute)]
        for node in nodes:
            by = script.bound(node.value, node) if isinstance(node, cst.Name) else ()
            defaults = [each.default for each in by if isinstance(each, cst.Param) and each.default is not None]
            if any(script.code(each) == "1" for each in defaults):
                return script.code(node)
            for call in self._work.calls():
                names = [script.code(each.value).strip("'\"-").replace("-", "_") for each in call.args]
                default = arguments(call, ()).get("default")
                is_one = default is not None and script.code(default.value) == "1"
                if self._work.short(call) == "add_argument" and is_one and script.code(node).split(".")[-1] in names:
                    return script.code(node)
        return None

    # ------------------------------------------------------------------ whole batches

    def _whole(self, value: Value) -> Iterator[tuple[Node, str]]:
        """Where a script needs whole batches of a loader, not to train on them, and why."""
        flow = self._flow
        for loop in self._loops.evaluating:
            if value in self._loops.loaders(loop):
                yield from ((loop.iter, reason) for reason in islice(self._metrics.why_whole(loop), 1))
        for call in self._work.calls():
            given = [argument.value for argument in call.args if value in flow.loaders(argument.value)]
            is_own = any(each.kind in ("function", "class") for each in flow.of(call.func))
            short = self._work.short(call)
            if given and not is_own and short not in _PASSED_ON and (short != "iter" or self._is_look(call)):
                yield given[0], f"{short}(...) takes whole batches"

    def _is_look(self, call: cst.Call) -> bool:
        """Whether what `iter` gives is only looked at: its batches aren't those of a training loop."""
        script = self._script
        nexts = [each for each in self._work.calls() if script.code(each.func) == "next" and each.args]
        targets = [each.target for assign in script.ancestors(call) for each in getattr(assign, "targets", ())]
        names = [*map(script.code, targets)]
        own = [each for each in nexts if script.is_inside(call, each) or script.code(each.args[0].value) in names]
        return bool(own) and not any(self._loops.at(each) & self._loops.training for each in own)

    def _show_whole(self, place: Node, value: Value, why: str) -> None:
        """Have a look at a loader that is divided be one at whole batches, on every rank the same."""
        work, script, call = self._work, self._script, _call(value)
        given = self._work.arguments(call, _POSITIONAL)
        kept = {name: script.code(given[name].value) for name in ("shuffle", "drop_last") if name in given}
        names = {"dataset", "batch_size", "num_workers", "pin_memory", *kept}
        holders = [each for each in script.inside(place) if self._flow.of(each, "loader") == {value}]
        if set(given) <= names and {*kept.values()} <= {"True", "False"} and holders:
            rest = "".join(f", {name}={text}" for name, text in kept.items())
            work.edits.template(
                holders[0], f"{script.code(call.func)}({{old}}.dataset, {{old}}.global_batch_size{rest})"
            )
            self._loops.whole.add(holders[0])
            work.note(place, f"every rank sees all of this: {why}", mark=True)
            return
        text = "of a loader that is trained on, and a rank would see its part: make a second DataLoader for it"
        work.refuse(place, f"{why}, {text} (line {script.line(place)})")

    # ------------------------------------------------------------------ loaders

    def _change_loader(self, call: cst.Call) -> None:
        work, edits, given = self._work, self._work.edits, self._work.arguments(call, _POSITIONAL)
        edits.template(call.func, "evenstep.DataLoader")
        if "generator" in given:
            work.note(call, "generator= was left out: the loader's order follows from its seed")
        names = {argument: name for name, argument in given.items()}

        def change(updated: cst.Call) -> cst.Call:
            kept: list[cst.Arg] = []
            for argument, new in zip(call.args, updated.args, strict=True):
                name = names.get(argument, "")
                unpacked = [*(work.settings(argument) or [{}])[0]] if argument.star else []
                if name in _LEFT_OUT:
                    continue
                if _CHANGED & {*unpacked}:
                    holder = self._script.code(argument.value)
                    for key in (each for each in unpacked if each not in _LEFT_OUT):
                        value = cst.Arg(cst.parse_expression(f"{holder}['{key}']"))
                        kept.append(_named(value, "global_batch_size" if key == "batch_size" else key))
                    continue
                if name == "batch_size" and (argument.keyword is not None or len(kept) != 1):
                    new = _named(new, "global_batch_size")
                elif (
                    argument.keyword is None and not argument.star and name not in ("dataset", "batch_size", "shuffle")
                ):
                    new = _named(new, name)
                kept.append(new)
            if kept and kept[-1] is not updated.args[-1]:
                kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(args=kept)

        edits.change(call, change)
        # Not seed=torch.initial_seed(): ranks have seeds of their own as soon as their random numbers differ, and
        # a loader that is made again would have the same order again.
        for each in work.seeds(are_numbers=False):
            if isinstance(each.func, cst.Attribute):
                line = f"{work.world}.seed = {self._script.code(each.func.value)}.initial_seed()"
                edits.add(edits.after, self._script.statement(each), f"{line}  # of the loaders' orders")

    def change_uses(self) -> None:
        """Change what is read of loaders that were divided."""
        script, edits = self._script, self._work.edits
        for node in script.nodes:
            if not isinstance(node, cst.Attribute) or node.attr.value not in ("sampler", "batch_size"):
                continue
            held = self._flow.of(node.value, "loader")
            call = script.parent(script.parent(node) or node)
            is_length = isinstance(call, cst.Call) and script.code(call.func) == "len"
            has_own = any("sampler" in self._work.arguments(_call(each), _POSITIONAL) for each in held)
            if not held or not held <= self.divided or (node.attr.value == "sampler" and (has_own or not is_length)):
                continue
            attr = "dataset" if node.attr.value == "sampler" else "global_batch_size"
            edits.template(node.attr, attr)


def _call(loader: Value) -> cst.Call:
    assert isinstance(loader.site, cst.Call)
    return loader.site


_EQUAL = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))


def _named(argument: cst.Arg, name: str) -> cst.Arg:
    equal = argument.equal if isinstance(argument.equal, cst.AssignEqual) else _EQUAL
    return argument.with_changes(keyword=cst.Name(name), equal=equal)
