"""Makes the numbers that a script adds up, shows and keeps those of all ranks, or remarks that they aren't."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import libcst as cst

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.losses import CONSTANT, MEAN, SUM, UNKNOWN, Kind
from evenstep.tools.reading.tree import Node, Statement, target_names
from evenstep.tools.reading.values import BUILTINS, Values

# Methods that use a number without showing or keeping it.
_STEPPING = {"backward", "zero_grad", "train", "eval", "unscale_", "add_", "mul_", "copy_", "clamp_", "fill_"}
_PURE = ("torch.", "numpy.", "math.")


class Metrics:
    """Changes numbers of a rank's samples to those of all ranks.

    Args:
        trained: The trained models.
    """

    def __init__(self, work: Work, loops: Loops, trained: Values) -> None:
        self._work, self._loops, self._trained = work, loops, trained
        self._script, self._flow, self._losses = work.script, work.flow, work.losses
        self._divided: Values = frozenset()
        self._added: set[tuple[Node | None, str]] = set()  # sums that are those of all ranks
        self._left: set[tuple[Node | None, str]] = set()  # sums that stay a rank's own

    def average(self, divided: Values) -> None:
        """Average or sum over ranks the numbers that the script prints or keeps.

        Args:
            divided: The loaders that are divided over ranks.
        """
        work, script, self._divided = self._work, self._script, divided
        for call in work.calls():
            if script.code(call.func).endswith(".item") or script.code(call.func) == "float":
                self._average(call)
        for node in script.nodes:
            if isinstance(node, cst.For | cst.While) and (loaders := self._loops.loaders(node)) and loaders <= divided:
                self._add_up(node)
        for node in script.nodes:
            if isinstance(node, cst.If | cst.While) and script.loops(node) and self._decides(node.test):
                work.note(node, "each rank decides this from its own samples, so ranks may differ", mark=True)
            if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and self._keeps(node.value):
                unknown = dict.fromkeys(map(script.code, self._unknown(node.value)))
                if unknown:
                    work.note(node, f"{', '.join(unknown)}: from rank 0's samples alone", mark=True)

    # ------------------------------------------------------------------ one number

    def _is_divided(self, node: Node) -> bool:
        loaders = frozenset().union(*(self._flow.loaders(site) for site in self._loops.taken_from(node)))
        return bool(loaders) and loaders <= self._divided

    def is_alone(self, node: Node) -> bool:
        """Whether a number depends on the rank's own samples only."""
        return self._is_divided(node) and not self._is_known(node)

    def _is_known(self, node: Node, depth: int = 0) -> bool:
        """Whether an expression is the same on all ranks, after the changes so far."""
        script, losses = self._script, self._losses
        if node in self._work.collectives or not losses.varies(node):
            return True
        if depth > 8 or losses.taken(node):
            return False
        parts: list[Node] = [*script.parts(node)]
        if isinstance(node, cst.Name):
            if (script.scope(node.value, node), node.value) in self._added:
                return True
            parts = [each.value for each in losses.definitions(node)]
            parts = parts or [each for each in losses.given(node) or () if each is not None]
        elif isinstance(node, cst.Call):
            parts += losses.results(node)
        return bool(parts) and all(self._is_known(part, depth + 1) for part in parts)

    def _average(self, node: Node) -> bool:
        """Average a mean over this rank's samples over all ranks. Returns whether the expression is such a mean."""
        kind = self._losses.kind(node)
        if kind.name != MEAN or node in self._loops.flowing or not self.is_alone(node) or self._is_in_sum(node):
            return False
        weight = kind.weight or self._loops.num_samples(self._loops.taken_from(node), node)
        if weight is None or (kind.weight is not None and self._is_bound_again(kind.weight, node)):
            return False
        self._work.average(node, weight)
        return True

    def _is_bound_again(self, weight: str, node: Node) -> bool:
        """Whether a name of a weight has another value where a mean is shown than where it was computed."""
        script = self._script
        shown = script.order(node)
        computed = max(
            (script.order(each) for each in self._losses.slice(node) if script.order(each) < shown), default=0
        )
        bound = [each for name in re.findall(r"\w+", weight) for each in script.bound(name, node)]
        return any(computed < script.order(each) < shown for each in bound)

    def _is_in_sum(self, node: Node) -> bool:
        """Whether a number is part of a term that is summed over ranks later: `total += loss.item() * len(x)`."""
        around = next(each for each in self._script.ancestors(node) if isinstance(each, cst.AugAssign | Statement))
        return isinstance(around, cst.AugAssign) and self._losses.kind(around.value).name == SUM

    def _decides(self, test: Node) -> bool:
        """Whether a condition depends on a rank's own values. Type checks, as `x is None`, don't count."""
        is_of_kind = re.search(r"\bis\b|\b(isinstance|hasattr|callable)\(", self._script.code(test))
        return not is_of_kind and self.is_alone(test)

    # ------------------------------------------------------------------ what is shown or kept

    def _keeps(self, call: cst.Call) -> bool:
        """Whether a call may show or keep its arguments."""
        passes, functions = self._loops.passes, self._flow.functions(call)
        trains = any(self._script.is_inside(each.call, of) for each in passes for of in functions)
        is_torchs = (self._script.qualified(call.func) or "").startswith("torch.")
        return self._work.short(call) not in _STEPPING and not is_torchs and not trains

    def _unknown(self, call: cst.Call) -> list[Node]:
        """Make the arguments of a call numbers of all ranks. Returns those that can't be."""
        given = [each.value for each in call.args]
        if self._flow.functions(call):  # its own code averages them, but not the weights that it is passed
            given = [each for each in given if self._losses.kind(each).name != MEAN]
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("append", "extend", "add", "insert"):
            holder = self._script.code(call.func.value)  # a list of tensors for the loss must keep the tensors
            if any(self._script.code(each) == holder for each in self._loops.flowing):
                return []
            return [each for each in given if self.is_alone(each)]
        return [each for argument in given for each in self._shown(argument)]

    def _shown(self, node: Node) -> list[Node]:
        """Make a shown expression a number of all ranks. Returns its parts that can't be."""
        is_text = isinstance(node, cst.BaseString | cst.Tuple | cst.List | cst.Dict | cst.BinaryOperation) or (
            isinstance(node, cst.Call) and self._work.short(node) in ("format", "str", "round", "dict")
        )
        if self.is_alone(node):
            if self._average(node):
                return []
            if self._losses.kind(node).name == SUM:
                name = self._script.code(node)
                if (self._script.scope(name, node), name) in self._left:
                    return [node]
                self._work.add_up(node)
                return []
            if not is_text:
                return [node]
        # A text may also show what isn't of a rank's samples.
        return [each for part in self._script.parts(node) for each in self._shown(part)] if is_text else []

    # ------------------------------------------------------------------ what is added up

    def _sums(self, loop: Node, kind: Callable[[Node], Kind]) -> list[tuple[cst.AugAssign, Kind]]:
        """The additions (`+=`) in a loop's own function, with their kinds, without those that build up a loss."""
        found: list[tuple[cst.AugAssign, Kind]] = []
        for node in self._script.inside(loop):
            is_sum = isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign)
            if is_sum and self._loops.at(node) == {loop} and node.value not in self._loops.flowing:  # type: ignore[attr-defined]
                assert isinstance(node, cst.AugAssign)
                hangs = self._hangs_on_samples(node, loop)
                found.append((node, Kind(UNKNOWN) if hangs else kind(node.value)))
        return found

    def _hangs_on_samples(self, node: cst.AugAssign, loop: Node) -> bool:
        """Whether samples decide where or how often is added: `hits[label] += 1`, `if right: n += 1`."""
        if isinstance(node.target, cst.Subscript) and any(map(self._losses.varies, node.target.slice)):
            return True
        for each in self._script.ancestors(node):
            if each is loop:
                break
            head = getattr(each, "test", None) or getattr(each, "iter", None)
            if head is not None and self._losses.varies(head) and not self._is_known(head):
                return not isinstance(head, cst.Call) or self._work.short(head) != "items"
        return False

    def _add_up(self, loop: Node) -> None:
        work, script = self._work, self._script
        added = self._sums(loop, self._losses.kind)
        unknown = next((node for node, kind in added if kind.name not in (MEAN, SUM, CONSTANT)), None)
        if unknown is not None:
            text = f"what {script.code(unknown.target)} adds up isn't understood"
            work.note(unknown, f"{text}: this and the counts beside it are from rank 0's samples alone", mark=True)
        for node, kind in added:
            self._average(node.value)
            if kind.name != SUM:
                continue
            name = script.code(node.target)
            known = self._added if unknown is None else self._left
            known.add((script.scope(name, node), name))
            if unknown is not None:  # a quotient of the two has to be one of the same samples
                continue
            if self._may_wait(node, loop):
                work.edits.add(work.edits.after, loop, f"{name} = {work.total.replace('{old}', name)}")
            else:
                work.add_up(node.value)

    def _may_wait(self, node: cst.AugAssign, loop: Node) -> bool:
        """Whether a sum starts just before the loop and is read only after it."""
        script, name = self._script, node.target
        if not isinstance(name, cst.Name) or isinstance(script.parent(loop), cst.SimpleStatementSuite):
            return False
        for each in script.inside(loop):
            parent = script.parent(each)
            is_added_to = isinstance(parent, cst.AugAssign) and parent.target is each
            if isinstance(each, cst.Name) and each.value == name.value and not is_added_to:
                return False
        around = script.loops(loop)
        starts = [script.statement(target) for target in script.bound(name.value, name)]
        return any(script.order(each) < script.order(loop) and script.loops(each) == around for each in starts)

    # ------------------------------------------------------------------ evaluations

    def why_whole(self, loop: Node) -> Iterator[str]:
        """The reasons why every rank must see all samples of an evaluation loop; none if each use is understood.

        Args:
            loop: An evaluation loop over a loader.
        """
        code, losses = self._script.code, self._losses
        if not isinstance(loop, cst.For):
            yield "it makes a list of all batches"
            return
        counted = self._loops.counts_on_size(loop)
        if counted is not None:
            yield f"{counted} expects a whole batch"
        if self._loops.num_samples(self._loops.in_head(loop), loop.body) is None:
            yield "its loader has no name in this loop"
        sums = dict(self._sums(loop, losses.metric))
        for node in self._script.inside(loop.body):
            match node:
                case cst.If(test=test) | cst.While(test=test) if losses.varies(test):
                    yield f"what it does depends on samples: {code(test)}"
                case cst.For() if losses.varies(node.iter):
                    yield f"it goes through samples one by one: {code(node.iter)}"
                case cst.AugAssign() if node not in sums or sums[node].name not in (MEAN, SUM, CONSTANT):
                    yield f"what {code(node.target)} adds up isn't understood"
                case cst.AssignTarget():
                    names = target_names(node.target)
                    kept = [name.value for name in names if self._is_read_behind(name, loop)]
                    if kept or not names:
                        yield f"{kept[0] if kept else code(node.target)} is read behind the loop"
                case cst.Expr(value=cst.Call() as call) if not self._is_harmless(call):
                    yield f"{code(call.func)} is given results of samples"
                case cst.Call() if not self._is_pure(node):
                    yield f"convert doesn't see whether {code(node.func)}(...) keeps what it is given"

    def _is_harmless(self, call: cst.Call) -> bool:
        """Whether a call's arguments depend on no samples, or it appends a mean, which can be averaged over ranks."""
        given = [argument.value for argument in call.args]
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "append" and len(given) == 1:
            return isinstance(given[0], cst.Call) and self._losses.metric(given[0]).name == MEAN
        return not any(map(self._losses.varies, given))

    def _is_pure(self, call: cst.Call, depth: int = 0) -> bool:
        """Whether a call keeps none of its arguments: it calls a model, torch, or a function that keeps nothing."""
        script, flow, name = self._script, self._flow, self._script.qualified(call.func)
        if name is not None or (isinstance(call.func, cst.Name) and call.func.value in BUILTINS):
            return name is None or name.startswith(_PURE)
        held = [value for value in flow.of(call.func) if value.kind != "batch"]
        if held:
            own = [value for value in held if value not in self._trained]
            functions = self._losses.called(call) if own else []
            is_known = all(value.kind == "function" or flow.is_module(value) for value in own)
            nodes = [node for function in functions for node in script.inside(function.body)]
            return is_known and depth < 4 and not any(self._keeps_more(node, depth + 1) for node in nodes)
        if not isinstance(call.func, cst.Attribute):
            return False
        base = call.func.value
        return self._losses.varies(base) or call.func.attr.value == "append" or flow.is_a(base, "loader")

    def _keeps_more(self, node: Node, depth: int) -> bool:
        """Whether a node of a function keeps values beyond the function's return value."""
        match node:
            case cst.Global() | cst.Nonlocal():
                return True
            case cst.AssignTarget(target=target) | cst.AugAssign(target=target):
                return isinstance(target, cst.Attribute | cst.Subscript)
            case cst.Expr(value=cst.Call() as call):
                return not self._is_harmless(call)
            case cst.Call():
                return not self._is_pure(node, depth)
        return False

    def _is_read_behind(self, name: cst.Name, loop: Node) -> bool:
        """Whether the first use of a name after a loop reads it, so that the loop's last value matters."""
        script, function = self._script, self._script.function(loop)
        last = script.order(script.inside(loop)[-1])
        for node in script.inside(script.module if function is None else function):
            is_same = isinstance(node, cst.Name) and node.value == name.value and script.function(node) is function
            if is_same and script.order(node) > last:
                return not isinstance(script.parent(node), cst.AssignTarget | cst.For | cst.AsName)
        return False
