"""Data: which loaders are divided over ranks, and how; epochs."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from evenstep.convert.loops import Loops
from evenstep.convert.source import Node
from evenstep.convert.values import Value, Values, arguments
from evenstep.convert.work import Work

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
_SUBSET, _WEIGHTED = "SubsetRandomSampler", "WeightedRandomSampler"
_PERHAPS_ONE = "a batch of one sample can't be divided over ranks: give the DataLoader a batch size"


class Data:
    """The loaders of a script.

    Attributes:
        divided: Those of which each rank gets a part.
    """

    def __init__(self, work: Work, loops: Loops) -> None:
        self._work, self._loops = work, loops
        self._script, self._flow = work.script, work.flow
        self.training: set[Value] = {value for loop in loops.training for value in loops.loaders(loop)}
        self.divided: Values = frozenset()

    def divide(self) -> None:
        """Have the loaders that are trained on divided over ranks, and those of evaluations where that is exact."""
        work = self._work
        divided = {value for value in self.training if self._change(value, is_training=True)}
        for value in sorted(self._evaluated(), key=lambda value: self._script.order(value.site)):
            reason = self._why_whole(value)
            if reason is None and self._change(value, is_training=False):
                divided.add(value)
            elif reason is not None:
                work.note(value.site, f"every rank evaluates all of this: {reason}", mark=True)
        self.divided = frozenset(divided)

    def _evaluated(self) -> set[Value]:
        found = {value for loop in self._loops.evaluating for value in self._loops.loaders(loop)}
        return found - self.training

    def _why_whole(self, value: Value) -> str | None:
        for loop in self._loops.evaluating:
            if value in self._loops.loaders(loop):
                reason = self._loops.can_be_divided(loop)
                if reason is not None:
                    return f"{reason} (line {self._script.line(loop)})"
        for node in self._script.nodes:  # a look at the first batch, or len(list(loader))
            if not isinstance(node, cst.Call) or self._script.code(node.func) not in ("next", "list"):
                continue
            if any(value in self._flow.of(argument.value, "loader") for argument in node.args):
                line = self._script.line(node)
                return f"{self._script.code(node.func)}(...) takes batches outside of a loop (line {line})"
        return None

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
        if "batch_sampler" in given and script.code(given["batch_sampler"].value) != "None":
            return "a batch_sampler decides which samples make a batch, for one process"
        size = given.get("batch_size")
        if size is None or script.code(size.value) in ("1", "None"):
            return _PERHAPS_ONE
        sampler = given.get("sampler")
        if sampler is not None and script.code(sampler.value) != "None":
            found = self._sampler(sampler.value)
            if found is None:
                return f"the order of its sampler ({script.code(sampler.value)}) is for one process"
            unseen = self._work.unseen(found.call, "name=value")
            if unseen is not None:
                return unseen
            if found.kind == _SUBSET and script.imports.get("torch") != "torch":
                return f"its sampler ({script.code(sampler.value)}) becomes a torch.utils.data.Subset: import torch"
        return None

    def _sampler(self, node: Node) -> _Sampler | None:
        """A sampler that can be replaced."""
        held = [value for value, _ in self._work.losses.reaching(node)] if isinstance(node, cst.Name) else [node]
        for value in held if len(held) == 1 else []:
            if not isinstance(value, cst.Call):
                continue
            kind = (self._script.qualified(value.func) or "").rsplit(".", 1)[-1]
            given = arguments(value, ("weights", "num_samples", "replacement", "generator"))
            if kind == "RandomSampler" and len(value.args) == 1:
                return _Sampler(kind, value)
            if kind == _SUBSET and value.args:
                inline = self._script.code(value.args[0].value)
                return _Sampler(kind, value, inline if value is node else f"{self._script.code(node)}.indices")
            replaces = "replacement" not in given or self._script.code(given["replacement"].value) == "True"
            if kind == _WEIGHTED and replaces:
                return _Sampler(kind, value)
        return None

    def _change_sampler(self, argument: cst.Arg, dataset: cst.Arg) -> bool:
        """Have a sampler's draws be those of all ranks; returns whether it stays, and isn't replaced by `shuffle`."""
        found, edits = self._sampler(argument.value), self._work.edits
        assert found is not None
        if found.kind == _SUBSET:
            edits.template(dataset.value, f"torch.utils.data.Subset({{old}}, {found.indices})")
        return found.kind == _WEIGHTED  # the loader draws by its weights, on all ranks alike

    def _change_loader(self, call: cst.Call, given: dict[str, cst.Arg]) -> None:
        work, edits = self._work, self._work.edits
        edits.template(call.func, "evenstep.DataLoader")
        for name, dropped in (("generator", "the loader's order follows from the seed of evenstep.init"),):
            if name in given:
                work.note(call, f"{name}= was left out: {dropped}")
        order = {id(given[name]): name for name in given}
        has_sampler = "sampler" in given and self._script.code(given["sampler"].value) != "None"
        keeps_sampler = has_sampler and self._change_sampler(given["sampler"], given["dataset"])

        def change(updated: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(updated, cst.Call)
            kept: list[cst.Arg] = []
            for argument, new in zip(call.args, updated.args, strict=True):
                name = order.get(id(argument), "")
                if name in ("generator", "batch_sampler", "in_order"):
                    continue
                if name == "batch_size":
                    new = _named(new, "global_batch_size") if argument.keyword is not None or len(kept) != 1 else new
                elif name == "sampler":
                    if self._script.code(argument.value) == "None":
                        continue
                    if keeps_sampler:
                        kept.append(_named(new, "sampler"))
                        continue
                    new = _named(new, "shuffle").with_changes(value=cst.Name("True"))
                elif argument.keyword is None and name not in ("dataset", "shuffle"):
                    new = _named(new, name)
                kept.append(new)
            if kept and kept[-1] is not updated.args[-1]:
                kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
            return updated.with_changes(args=kept)

        edits.change(call, change)

    # ------------------------------------------------------------------ what is asked of loaders, and epochs

    def change_uses(self) -> None:
        """Change what is read of loaders that were divided, and have epochs counted."""
        script, edits = self._script, self._work.edits
        for node in script.nodes:
            if isinstance(node, cst.Attribute) and node.attr.value == "sampler":
                held, call = self._flow.of(node.value, "loader"), script.parent(script.parent(node) or node)
                if held and held <= self.divided and isinstance(call, cst.Call) and script.code(call.func) == "len":
                    edits.change(node, lambda new: new.with_changes(attr=cst.Name("dataset")))
            if isinstance(node, cst.Attribute) and node.attr.value == "batch_size":
                held = self._flow.of(node.value, "loader")
                if held and held <= self.divided:
                    edits.change(node, lambda new: new.with_changes(attr=cst.Name("global_batch_size")))
        seen: set[Node] = set()
        for loop in sorted(self._loops.training, key=script.order):
            for value in sorted(self._loops.loaders(loop), key=lambda each: script.order(each.site)):
                if value in self.divided:
                    self._count_epochs(value, seen)

    def _count_epochs(self, value: Value, seen: set[Node]) -> None:
        work, script, edits = self._work, self._script, self._work.edits
        found = self._epochs_of(value)
        if found is None:
            return
        epochs, name = found
        assert isinstance(epochs.target, cst.Name)
        counter = epochs.target.value
        if counter == "_" and epochs in seen:
            counter = work.unused("epoch")
            edits.template(epochs.target, counter)
        assert isinstance(epochs.iter, cst.Call)
        if len(epochs.iter.args) == 1 and epochs not in seen:
            edits.change(epochs.iter, lambda new: _with_function(new, f"{name}.epochs", script.module))
        elif epochs.target.value != "_":
            edits.add(edits.inside, epochs, f"{name}.set_epoch({counter})")
        seen.add(epochs)

    def _epochs_of(self, value: Value) -> tuple[cst.For, str] | None:
        """The loop over epochs around the training, and the loader's name there."""
        script = self._script
        best: tuple[cst.For, str] | None = None
        for node in script.nodes:
            is_range = (
                isinstance(node, cst.For)
                and isinstance(node.target, cst.Name)
                and isinstance(node.iter, cst.Call)
                and script.code(node.iter.func) == "range"
                and isinstance(node.body, cst.IndentedBlock)
            )
            if not is_range or node in self._loops.training:
                continue
            assert isinstance(node, cst.For)
            if any(loop in self._loops.training for loop in script.loops(node)):
                continue
            name = self._name_of(value, node.body)
            if name is not None:
                best = node, name  # the innermost comes last
        return best

    def _name_of(self, value: Value, around: Node) -> str | None:
        script = self._script
        for node in script.inside(around):
            if not isinstance(node, cst.Name | cst.Attribute) or self._flow.of(node, "loader") != {value}:
                continue
            if isinstance(script.parent(node), cst.Attribute) and isinstance(node, cst.Name):
                continue
            if isinstance(node, cst.Name):
                by = [each for each in script.bound(node.value, node) if isinstance(each, cst.Name)]
                if any(script.is_inside(each, around) for each in by):
                    continue  # made anew in every epoch, or only what iterates the loader
                if any(self._is_iterator(each) for each in by):
                    continue
            return script.code(node)
        return None

    def _is_iterator(self, target: cst.Name) -> bool:
        assign = next((each for each in self._script.ancestors(target) if isinstance(each, cst.Assign)), None)
        if assign is None or not isinstance(assign.value, cst.Call):
            return False
        return self._script.code(assign.value.func).rsplit(".", 1)[-1] in ("iter", "tqdm", "cycle", "enumerate")


@dataclass(frozen=True)
class _Sampler:
    """A sampler of torch's.

    Attributes:
        indices: Of a SubsetRandomSampler, what it draws from, as an expression.
    """

    kind: str
    call: cst.Call
    indices: str = ""


_EQUAL = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))


def _named(argument: cst.Arg, name: str) -> cst.Arg:
    equal = argument.equal if isinstance(argument.equal, cst.AssignEqual) else _EQUAL
    return argument.with_changes(keyword=cst.Name(name), equal=equal)


def _with_function(call: cst.CSTNode, function: str, module: cst.Module) -> cst.CSTNode:
    return call.with_changes(func=cst.parse_expression(function, module.config_for_parsing))
