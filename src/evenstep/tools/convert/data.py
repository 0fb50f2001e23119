"""Data: which loaders are divided over ranks, and how."""

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
# Builtins that take whole batches from a loader passed to them.
_TAKING = {"list", "tuple", "set", "sorted", "reversed", "sum", "map", "filter", "max", "min", "any", "all"}
_PASSED_ON = (BUILTINS | PASSING) - _TAKING - {"iter"}


class Data:
    """Decides which loaders of a script are divided over ranks, and changes them.

    Attributes:
        divided: The loaders that are divided over ranks.
    """

    def __init__(self, work: Work, loops: Loops, metrics: Metrics) -> None:
        self._work, self._loops, self._metrics = work, loops, metrics
        self._script, self._flow = work.script, work.flow
        self.divided: Values = frozenset()

    def divide(self) -> None:
        """Divide the loaders of training over ranks, and those of evaluations whose results stay exact."""
        work, loops, order = self._work, self._loops, lambda value: self._script.order(value.site)
        sites = [site for each in loops.passes for site in loops.taken_from(each.loss)]
        training = {value for loop in loops.training for value in loops.loaders(loop)}
        training |= {value for site in sites for value in self._flow.loaders(site)}
        for value in sorted(training, key=order):
            problem = self._problem(_call(value))
            if problem is not None:
                work.refuse(value.site, problem)
            for place, why in self._whole(value):
                text = "and this loader is divided over ranks: make a second DataLoader for it"
                work.refuse(place, f"{why}, {text}")
        divided = set(training)
        for value in sorted({each for loop in loops.evaluating for each in loops.loaders(loop)} - training, key=order):
            reasons = [f"{why} (line {self._script.line(at)})" for at, why in self._whole(value)]
            problem = next(iter(reasons), None) or self._problem(_call(value))
            if problem is None:
                divided.add(value)
            else:
                work.note(value.site, f"every rank evaluates all of this: {problem}", mark=True)
        for value in sorted(divided, key=order):
            self._change_loader(_call(value))
        self.divided = frozenset(divided)

    def _problem(self, call: cst.Call) -> str | None:
        """Why a loader can't be divided; None if it can."""
        given = arguments(call, _POSITIONAL)
        wanted = [f"{name}=..." for name in ("batch_size", "shuffle") if name not in given]
        unseen = self._work.unseen(call, ", ".join(wanted), {*_LEFT_OUT, "batch_size"}, in_all="batch_size")
        sizes = [self._script.code(each) for each in self._work.given(call, "batch_size")]
        is_one = not sizes or {"1", "None"} & {*sizes}
        if unseen is None and is_one and "batch_sampler" not in given and not self._work.given(call, "batch_sampler"):
            return "a batch of one sample can't be divided over ranks: give the DataLoader a batch size"
        return unseen

    def _whole(self, value: Value) -> Iterator[tuple[Node, str]]:
        """(node, reason) for each use of a loader, other than training, that needs whole batches."""
        flow = self._flow
        for loop in self._loops.evaluating:
            if value in self._loops.loaders(loop):
                yield from ((loop.iter, reason) for reason in islice(self._metrics.why_whole(loop), 1))
        for call in self._work.calls():
            given = [argument.value for argument in call.args if value in flow.loaders(argument.value)]
            is_own = any(each.kind in ("function", "class") for each in flow.of(call.func))
            short = self._work.short(call)
            if given and not is_own and short not in _PASSED_ON and (short != "iter" or self._is_peek(call)):
                yield given[0], f"{short}(...) takes a whole batch"

    def _is_peek(self, call: cst.Call) -> bool:
        """Whether a call of `iter` only peeks at batches: `next` takes some, and never in a training loop."""
        script = self._script
        nexts = [each for each in self._work.calls() if script.code(each.func) == "next" and each.args]
        targets = [each.target for assign in script.ancestors(call) for each in getattr(assign, "targets", ())]
        names = [*map(script.code, targets)]
        own = [each for each in nexts if script.is_inside(call, each) or script.code(each.args[0].value) in names]
        return bool(own) and not any(self._loops.at(each) & self._loops.training for each in own)

    # ------------------------------------------------------------------ loaders

    def _change_loader(self, call: cst.Call) -> None:
        work, edits, given = self._work, self._work.edits, arguments(call, _POSITIONAL)
        edits.template(call.func, "evenstep.DataLoader")
        if "generator" in given:
            work.note(call, "generator= was left out: evenstep's loader draws its order from world.seed")
        names = {argument: name for name, argument in given.items()}

        def change(updated: cst.Call) -> cst.Call:
            kept: list[cst.Arg] = []
            for argument, new in zip(call.args, updated.args, strict=True):
                name = names.get(argument, "")
                if name in _LEFT_OUT:
                    continue
                if name == "batch_size" and (argument.keyword is not None or len(kept) != 1):
                    new = _named(new, "global_batch_size")
                elif name not in ("", "dataset", "batch_size", "shuffle") and argument.keyword is None:
                    new = _named(new, name)
                elif argument.star and any("batch_size" in each for each in work.settings(argument.value)):
                    unpacked = self._script.code(argument.value)
                    kept.append(_named(cst.Arg(cst.parse_expression(f"{unpacked}['batch_size']")), "global_batch_size"))
                    value = cst.parse_expression(f"{{**{unpacked}, 'batch_size': None}}")
                    new = new.with_changes(value=value)
                kept.append(new)
            if kept and kept[-1] is not updated.args[-1]:
                kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(args=kept)

        edits.change(call, change)
        # Not seed=torch.initial_seed(): each rank has its own as soon as their random numbers differ. And a loader that
        # is made anew would repeat the same order.
        for each in work.seeds(are_numbers=False):
            if isinstance(each.func, cst.Attribute):
                line = f"{work.world}.seed = {self._script.code(each.func.value)}.initial_seed()"
                edits.add(edits.after, self._script.statement(each), f"{line}  # of the loaders' orders")

    def change_uses(self) -> None:
        """Rename `batch_size`, where the script reads it from a divided loader, to `global_batch_size`."""
        for node in self._script.nodes:
            if isinstance(node, cst.Attribute) and node.attr.value == "batch_size":
                held = self._flow.of(node.value, "loader")
                if held and held <= self.divided:
                    self._work.edits.template(node.attr, "global_batch_size")


def _call(loader: Value) -> cst.Call:
    assert isinstance(loader.site, cst.Call)
    return loader.site


_EQUAL = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))


def _named(argument: cst.Arg, name: str) -> cst.Arg:
    equal = argument.equal if isinstance(argument.equal, cst.AssignEqual) else _EQUAL
    return argument.with_changes(keyword=cst.Name(name), equal=equal)
