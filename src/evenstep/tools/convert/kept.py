"""Losses that depend on more than a rank's batch: on earlier batches, unread code, or the size of whole batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import libcst as cst

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.loops import Loops
from evenstep.tools.convert.models import LIBRARIES
from evenstep.tools.reading.tree import Node, target_names
from evenstep.tools.reading.values import BUILTINS, Values

_ADDING = {"append", "appendleft", "extend", "insert", "add", "put", "add_", "copy_", "lerp_", "index_copy_"}
# Libraries whose functions treat samples independently.
_BY_SAMPLE = LIBRARIES | {"einops", "timm", "transformers", "torchaudio", "torchtext", "albumentations"}
_BATCH_SIZE = re.compile(r"(\w+\.)*(batch_?size|bsz?)", re.IGNORECASE)
_Holder = tuple[Node | None, str]  # (function or class that a name or attribute belongs to, its code)


class Kept:
    """Remarks on code that makes a loss differ when each rank has a part of the batch.

    Args:
        trained: The trained models.
        is_alone: Whether a number depends on the rank's own samples only, after the changes so far.
    """

    def __init__(self, work: Work, loops: Loops, trained: Values, is_alone: Callable[[Node], bool]) -> None:
        self._work, self._loops, self._trained, self._is_alone = work, loops, trained, is_alone
        self._script, self._losses = work.script, work.losses
        self._updates: dict[_Holder, list[tuple[Node, Node]]] = {}  # (node that changes a holder, its new value)
        for node in self._script.nodes:
            for target, value in self._changes(node):
                self._updates.setdefault(self._holder(target), []).append((node, value))

    def remark(self) -> None:
        """Mark such lines of all losses, and refuse parameters and buffers that have the size of a batch."""
        script, said = self._script, set[str]()
        for each in self._loops.passes:
            for node in sorted(self._losses.slice(each.loss, forwards=True), key=script.order):
                unread = self._unread(node) if isinstance(node, cst.Call) else None
                if unread is not None and unread not in said:
                    said.add(unread)
                    text = f"convert doesn't read {unread}: if it compares samples, keeps them or adds them up, ranks"
                    self._work.note(node, f"{text} compute another loss", mark=True)
                for update in self._kept(node) if isinstance(node, cst.Name | cst.Attribute) else ():
                    text = f"each rank keeps its own {script.code(node)}, made of its own samples: use"
                    self._work.note(update, f"{text} world.mean or world.gather before it is kept", mark=True)
        for call in self._work.calls():
            if self._work.short(call) in ("Parameter", "register_buffer", "register_parameter"):
                nodes = {part for argument in call.args for part in self._losses.slice(argument.value)}
                if any(_BATCH_SIZE.fullmatch(script.code(part)) for part in nodes):
                    text = "this has a row for each sample of a whole batch, and a rank has fewer samples: give it the"
                    self._work.refuse(call, f"{text} shape (1, ...), which torch repeats for each sample")

    # ------------------------------------------------------------------ what is kept over steps

    def _changes(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """(changed name or attribute, new value) for each assignment or in-place change that a node makes."""
        match node:
            case cst.Assign():
                for target in node.targets:
                    names: list[Node] = [*target_names(target.target)]
                    yield from ((self._base(each), node.value) for each in names or [target.target])
            case cst.AugAssign():
                yield self._base(node.target), node.value
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=method))) if method in _ADDING:
                yield from ((self._base(base), each.value) for each in node.args)

    def _base(self, node: Node) -> Node:
        """The changed object: `bank` for `bank[:8] = x`, `center` for `center.data.mul_(0.9).add_(x)`."""
        match node:
            case cst.Subscript(value=base):
                return self._base(base)
            case cst.Attribute(value=base, attr=cst.Name(value="data")) if self._script.code(base) != "self":
                return self._base(base)
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=method))) if method.endswith("_"):
                return self._base(base)
        return node

    def _holder(self, node: Node) -> _Holder:
        script, text = self._script, self._script.code(node)
        if isinstance(node, cst.Name):
            return script.scope(text, node), text
        function = script.function(node)
        return script.class_of(function) if function is not None and text.startswith("self.") else None, text

    def _kept(self, node: cst.Name | cst.Attribute) -> list[Node]:
        """The updates that store values of a rank's own samples, without gradients, in a name that later steps read."""
        script, loops = self._script, self._loops
        around = [each for each in script.loops(node) if each in loops.training]
        function = script.function(node)
        is_own = isinstance(node, cst.Name) and script.scope(node.value, node) is function
        given = [name for each in around if isinstance(each, cst.For) for name in target_names(each.target)]
        if (is_own and not around) or script.code(node) in map(script.code, given):
            return []  # the name ends with the function, or the loop sets it
        updates = [
            (update, value)
            for update, value in self._updates.get(self._holder(node), ())
            if (script.is_inside(update, around[0]) if is_own else loops.at(update) & loops.training)
        ]
        within = around[0] if around else script.function(node) or script.module
        anew = [update for update, value in updates if self._begins_anew(update, value, node, within)]
        if any(script.function(each) is not function or script.order(each) < script.order(node) for each in anew):
            return []
        return [
            update
            for update, value in updates
            if self._is_alone(value) and not self._losses.models(value, self._trained)
        ]

    def _begins_anew(self, update: Node, value: Node, node: Node, within: Node) -> bool:
        """Whether an update replaces the whole value of a name, unconditionally, without using its old value."""
        script, targets = self._script, getattr(update, "targets", ())
        is_whole = bool(targets) and not any(isinstance(each.target, cst.Subscript) for each in targets)
        is_free = script.code(node) not in {*map(script.code, script.inside(value))}
        choices = [each.node for each in script.frames[update].outwards() if each.kind in ("if", "except")]
        around = [each for each in choices if each is not None and script.is_inside(update, each)]
        return is_whole and is_free and not any(script.is_inside(each, within) for each in around)

    # ------------------------------------------------------------------ what isn't read

    def _unread(self, call: cst.Call) -> str | None:
        """The function or object of another file that a call passes samples to, unless it is a trained model.

        None also for libraries that treat samples independently.
        """
        script, flow = self._script, self._work.flow
        if not any(self._losses.batches(argument.value) - {None} for argument in call.args):
            return None
        text, name = script.code(call.func), script.qualified(call.func)
        if name is not None:
            return None if name.split(".")[0] in _BY_SAMPLE else name
        base = call.func.value if isinstance(call.func, cst.Attribute) else call.func
        for value in flow.of(call.func, "object") | flow.of(base, "object"):
            if value.definition is None and value not in self._trained and isinstance(value.site, cst.Call):
                made = value.made_by or self._of_star(value.site.func)
                if made and made.split(".")[0] not in _BY_SAMPLE:
                    return f"{text} ({made})"
        return self._of_star(call.func) or None

    def _of_star(self, func: Node) -> str:
        """The name of a function that only `from module import *` can bind; "" if the file binds it."""
        script, name = self._script, self._script.code(func)
        is_free = (
            isinstance(func, cst.Name) and not script.bound(name, func) and name not in {*script.imports, *BUILTINS}
        )
        return name if is_free and script.has_stars else ""
