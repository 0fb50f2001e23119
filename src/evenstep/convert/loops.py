"""The loops of a script: which train and which evaluate, how large a batch is, and the numbers that they add up."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from evenstep.convert.losses import CONSTANT, MEAN, PAIRS, SUM, UNKNOWN, Kind
from evenstep.convert.source import Node, Statement, target_names
from evenstep.convert.values import Value, Values, arguments
from evenstep.convert.work import Work

_SHAPING = {"view", "reshape", "ones", "zeros", "full", "rand", "randn", "randint", "expand", "repeat", "init_hidden"}
_ESCAPING = {"append", "extend", "update", "add", "insert", "write", "setdefault"}


@dataclass(frozen=True)
class Pass:
    """A call of `backward`.

    Attributes:
        call: The call.
        loss: What it is called on, without a scaler around it.
        scaler: The scaler's name, if there is one.
        batch: The expression whose length is the number of samples.
        loops: The loops whose batches these are.
    """

    call: cst.Call
    loss: cst.BaseExpression
    scaler: str | None
    weight: str
    kind: Kind
    loops: frozenset[Node]


class Loops:
    """Finds the loops of a script.

    Attributes:
        passes: The backward passes.
        training: Loops whose batches are trained on.
        evaluating: Other loops over loaders.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script, self._flow = work.script, work.flow
        self.passes: list[Pass] = []
        for call in work.calls():
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
                self._read_pass(call)
        self.training: set[Node] = {loop for each in self.passes for loop in each.loops}
        self.evaluating = [
            node
            for node in self._script.nodes
            if isinstance(node, cst.For | cst.CompFor) and node not in self.training and self.loaders(node)
        ]

    # ------------------------------------------------------------------ loaders of loops

    def loaders(self, loop: Node) -> Values:
        """The loaders whose batches a loop takes."""
        found: set[Value] = set()
        if isinstance(loop, cst.For | cst.CompFor):
            for node in self._script.inside(loop.iter):
                if isinstance(node, cst.BaseExpression) and not self._is_length(node):
                    found |= self._flow.of(node, "loader")
        if isinstance(loop, cst.For | cst.While) and not found:
            for node in self._script.inside(loop):
                if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "next":
                    found |= self._flow.of(node.args[0].value, "loader") if node.args else frozenset()
        return frozenset(found)

    def _is_length(self, node: Node) -> bool:
        """Whether it is only asked how long a loader is, as in `range(len(loader))`."""
        return any(
            isinstance(each, cst.Call) and self._script.code(each.func) in ("len", "range")
            for each in [node, *self._script.ancestors(node)][:4]
        )

    # ------------------------------------------------------------------ passes

    def _read_pass(self, call: cst.Call) -> None:
        work, script = self._work, self._script
        assert isinstance(call.func, cst.Attribute)
        loss, scaler = call.func.value, None
        match loss:
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="scale"))) if loss.args:
                if self._flow.is_a(base, "scaler"):
                    loss, scaler = loss.args[0].value, script.code(base)
        name = script.qualified(call.func) or ""
        if name == "torch.autograd.backward" or script.code(call.func.value) in ("self", "super()"):
            work.refuse(call, f"{script.code(call.func)}(...): only loss.backward() is understood")
            return
        if any(argument.keyword is None for argument in call.args):
            work.refuse(call, "backward() is given a gradient: the loss has to be one number")
            return
        batch = self.batch_at(call)
        if batch is None:
            self._refuse_without_batch(call)
            return
        weight, loops = batch
        kind = work.losses.kind(loss)
        if kind.name == PAIRS:
            work.refuse(
                call,
                "each sample is compared with all others of its batch, so ranks would compare theirs with fewer: "
                "gather the features of all ranks first (docs/how-to/contrastive.md)",
            )
            return
        if kind.name == UNKNOWN:
            work.note(call, "the loss is taken to be the mean over the batch's samples; evenstep verify tells")
        self.passes.append(Pass(call, loss, scaler, kind.weight or weight, kind, loops))

    def _refuse_without_batch(self, call: cst.Call) -> None:
        elsewhere = self._made_elsewhere(call)
        if elsewhere is not None:
            text = (
                f"batches come from {elsewhere}, of another file, and only this one is read and changed: make the "
                f"DataLoader here"
            )
        elif not any(self._flow.is_a(each, "loader") for each in self._work.calls()):
            text = "batches don't come from a torch DataLoader: make one (of a TensorDataset, for example)"
        else:
            text = "it isn't clear which tensor holds the samples: loop over the DataLoader, and unpack its batches"
        self._work.refuse(call, text)

    def batch_at(self, node: Node) -> tuple[str, frozenset[Node]] | None:
        """The number of samples of the batch at some place, as an expression, and the loops that it comes from."""
        script, flow = self._script, self._flow
        function = script.function(node)
        packed: tuple[str, frozenset[Node]] | None = None
        for name, by in script.bindings.get(function, {}).items():
            values = frozenset().union(*(flow.of(each, "batch") for each in by if isinstance(each, cst.Name)))
            for each in by:
                if isinstance(each, cst.Param):
                    values |= flow.of(each.name, "batch")
            if not values or all(script.order(each) > script.order(node) for each in by):
                continue
            if any(isinstance(script.parent(each), cst.CompFor) or self._in_comprehension(each) for each in by):
                continue
            sites = frozenset(value.site for value in values)
            sites = sites & frozenset(script.loops(node)) or sites
            how = self._how_packed(name, function, by)
            if how is None:
                return f"len({name})", sites
            if how and packed is None:
                packed = f"len({how})", sites
        return packed

    def _in_comprehension(self, node: Node) -> bool:
        return any(isinstance(each, cst.CompFor | cst.Lambda) for each in self._script.ancestors(node))

    def _how_packed(self, name: str, function: cst.FunctionDef | None, by: list[Node]) -> str | None:
        """None for a tensor; else the expression of a tensor within it, "" if none is known."""
        script = self._script
        first = ""
        is_packed = False
        around: Node = function if function is not None else script.module
        for node in script.inside(around):
            if not isinstance(node, cst.Name) or node.value != name or node in by:
                continue
            parent = script.parent(node)
            if isinstance(parent, cst.Subscript) and parent.value is node and len(parent.slice) == 1:
                index = parent.slice[0].slice
                if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString | cst.Integer):
                    is_packed = True
                    first = first or script.code(parent)
            elif isinstance(parent, cst.Assign) and parent.value is node:
                is_packed |= any(isinstance(target.target, cst.Tuple | cst.List) for target in parent.targets)
            elif isinstance(parent, cst.CompFor | cst.For) and parent.iter is node:
                is_packed = True
            elif isinstance(parent, cst.Arg) and (parent.star or script.code(script.parent(parent)).startswith("map(")):  # type: ignore[arg-type]
                is_packed = True
                first = first or (f"next(iter({name}.values()))" if parent.star == "**" else f"{name}[0]")
            elif isinstance(parent, cst.Attribute) and parent.attr.value in ("items", "keys", "values"):
                is_packed = True
                first = first or f"next(iter({name}.values()))"
        return first if is_packed else None

    def _made_elsewhere(self, call: cst.Call) -> str | None:
        """What the training loop iterates, if the script imports it or gets it from a function that it imports."""
        script = self._script
        for loop in script.loops(call):
            if not isinstance(loop, cst.For) or not isinstance(loop.iter, cst.Name):
                continue
            for by in script.bound(loop.iter.value, loop.iter):
                assign = next((each for each in script.ancestors(by) if isinstance(each, cst.Assign)), None)
                if assign is None or not isinstance(assign.value, cst.Call):
                    continue
                name = script.qualified(assign.value.func)
                if name is not None and not name.startswith(("torch.", "numpy.")):
                    return f"{script.code(assign.value.func)}()"
            if not script.bound(loop.iter.value, loop.iter) and loop.iter.value in script.imports:
                return loop.iter.value
        return None

    # ------------------------------------------------------------------ numbers that are added up

    def average_metrics(self, converted: Values) -> None:
        """Have the numbers that are printed or kept be those of all ranks.

        Args:
            converted: Loaders that are divided over ranks.
        """
        work, script = self._work, self._script
        for node in script.nodes:
            match node:
                case cst.Call(func=cst.Attribute(value=number, attr=cst.Name(value="item"))) if not node.args:
                    pass
                case cst.Call(func=cst.Name(value="float")) if len(node.args) == 1:
                    number = node.args[0].value
                    if isinstance(number, cst.Call) and script.code(number.func).endswith(".item"):
                        continue
                case cst.FormattedStringExpression() if isinstance(node.expression, cst.Name):
                    number = node.expression
                    if not self._is_loss(number):
                        continue
                case cst.Arg() if isinstance(node.value, cst.Name) and self._is_for_writer(node):
                    number = node.value
                    if not self._is_loss(number):
                        continue
                case _:
                    continue
            place = node if isinstance(node, cst.Call) else number
            batch = self._divided_batch(place, converted)
            if batch is None or self._is_in_sum(place, converted):
                continue
            kind = work.losses.kind(number)
            if kind.name == MEAN and not self._is_averaged(number):
                work.average(place, kind.weight or batch)
        for node in script.nodes:
            if isinstance(node, cst.For | cst.While) and self._is_divided(node, converted):
                self._add_up(node, converted)

    def _is_averaged(self, number: Node, depth: int = 0) -> bool:
        """Whether a number was made of others that are averaged over ranks where they were read."""
        script = self._script
        for node in script.inside(number):
            if isinstance(node, cst.Call):
                if script.code(node.func).endswith((".item", "float")):
                    return True
                if depth < 4 and any(self._is_averaged(each, depth + 1) for each in self._returned(node)):
                    return True
            if isinstance(node, cst.Name) and depth < 4:
                for value, adds in self._work.losses.reaching(node):
                    if adds and self._work.losses.kind(value).name == MEAN and script.loops(value):
                        return True
                    is_number = isinstance(value, cst.Name | cst.BinaryOperation | cst.Call | cst.UnaryOperation)
                    if is_number and self._is_averaged(value, depth + 1):
                        return True
        return False

    def _returned(self, call: cst.Call) -> list[Node]:
        """What the script's own functions return that a call may call."""
        return [
            node.value
            for function in self._flow.functions(call)
            for node in self._script.inside(function)
            if isinstance(node, cst.Return) and node.value is not None and self._script.function(node) is function
        ]

    def _is_loss(self, node: Node) -> bool:
        return self._work.losses.kind(node).name == MEAN

    def _is_for_writer(self, node: cst.Arg) -> bool:
        call = self._script.parent(node)
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return False
        return self._flow.is_a(call.func.value, "writer")

    def _divided_batch(self, node: Node, converted: Values) -> str | None:
        found = self.batch_at(node)
        if found is None:
            return None
        weight, loops = found
        around = [loop for loop in self._script.loops(node) if self.loaders(loop)]
        counted = frozenset(around[:1]) or loops
        return weight if any(self._is_divided(loop, converted) for loop in counted) else None

    def _is_divided(self, loop: Node, converted: Values) -> bool:
        loaders = self.loaders(loop)
        return bool(loaders) and loaders <= converted

    def _is_in_sum(self, node: Node, converted: Values) -> bool:
        """Whether a number is a factor of one that is added up over ranks later: `loss.item() * len(x)`."""
        for each in self._script.ancestors(node):
            if isinstance(each, cst.AugAssign):
                return self._work.losses.kind(each.value).name == SUM
            if isinstance(each, Statement):
                return False
        return False

    def accumulators(self, loop: Node) -> list[tuple[cst.AugAssign, Kind]]:
        """What a loop adds up, in its own function."""
        script = self._script
        function = script.function(loop)
        return [
            (node, self._work.losses.kind(node.value))
            for node in script.inside(loop)
            if isinstance(node, cst.AugAssign)
            and isinstance(node.operator, cst.AddAssign)
            and script.function(node) is function
            and next((each for each in script.loops(node) if each is loop or self.loaders(each)), None) is loop
        ]

    def _add_up(self, loop: Node, converted: Values) -> None:
        work, script = self._work, self._script
        added = self.accumulators(loop)
        unknown = next((node for node, kind in added if kind.name not in (MEAN, SUM, CONSTANT)), None)
        if unknown is not None:
            text = f"what {script.code(unknown.target)} adds up isn't understood"
            work.note(unknown, f"{text}: it and what is counted beside it are those of rank 0's samples", mark=True)
        for node, kind in added:
            if kind.name == MEAN:
                batch = self._divided_batch(node, converted)
                if batch is not None and not any(each in work.collectives for each in script.inside(node.value)):
                    work.average(node.value, kind.weight or batch)
            if kind.name != SUM or unknown is not None:  # a quotient of the two has to be one of the same samples
                continue
            name = script.code(node.target)
            if self._may_wait(node, loop):
                line = f"{name} = {work.total.replace('{old}', name)}"
                work.edits.add(work.edits.after, loop, line)
            else:
                work.add_up(node.value)

    def _may_wait(self, node: cst.AugAssign, loop: Node) -> bool:
        """Whether a sum begins at the loop and is read behind it only."""
        script = self._script
        if not isinstance(node.target, cst.Name) or isinstance(script.parent(loop), cst.SimpleStatementSuite):
            return False
        name, function = node.target.value, script.function(node)
        for each in script.inside(loop):
            if isinstance(each, cst.Name) and each.value == name and not self._is_added_to(each):
                return False
        around = set(script.loops(loop))
        for target in script.bindings.get(function, {}).get(name, []):
            statement = script.statement(target)
            if script.order(statement) < script.order(loop) and around == set(script.loops(target)):
                return True
        return False

    def _is_added_to(self, name: cst.Name) -> bool:
        parent = self._script.parent(name)
        return isinstance(parent, cst.AugAssign) and parent.target is name

    # ------------------------------------------------------------------ evaluations

    def can_be_divided(self, loop: Node) -> str | None:
        """Why an evaluation has to see all samples on every rank; None if it can be divided over ranks."""
        script = self._script
        if not isinstance(loop, cst.For):
            return "it makes a list of all batches"
        function = script.function(loop)
        found = self.batch_at(loop.body.body[-1]) if isinstance(loop.body, cst.IndentedBlock) else None
        own = {name.value for name in target_names(loop.target)}
        counted = self.counts_on_size(loop)
        if counted is not None:
            return f"{counted} counts on whole batches"
        for node in script.inside(loop):
            if script.function(node) is not function:
                continue
            match node:
                case cst.Break() | cst.Return() | cst.Yield():
                    return "it may end early"
                case cst.AugAssign():
                    kind = self._work.losses.kind(node.value)
                    if kind.name not in (MEAN, SUM, CONSTANT) or not isinstance(node.operator, cst.AddAssign):
                        return f"what {script.code(node.target)} adds up isn't understood"
                    if kind.name in (MEAN, SUM) and found is None:
                        return "it isn't clear which tensor holds its samples"
                case cst.Assign():
                    for target in node.targets:
                        for name in target_names(target.target):
                            if name.value not in own and self._is_read_behind(name, loop):
                                return f"{name.value} is read behind its loop"
                        if not target_names(target.target):
                            return f"{script.code(target.target)} is kept"
                case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value=method))):
                    if method in _ESCAPING and not self._keeps_means(node):
                        return f"{script.code(node.func)} keeps what every sample gave"
                    if self._flow.is_a(base, "writer"):
                        return f"{script.code(node.func)} writes while it runs"
        return None

    def counts_on_size(self, loop: Node) -> str | None:
        """What makes or shapes a tensor by the batch size that a loader was given, where a rank has fewer samples."""
        script = self._script
        sizes = {
            script.code(argument.value)
            for value in self.loaders(loop)
            if isinstance(value.site, cst.Call)
            for name, argument in arguments(value.site, ("dataset", "batch_size")).items()
            if name == "batch_size"
        }
        for node in script.inside(loop):
            if isinstance(node, cst.Call) and script.code(node.func).rsplit(".", 1)[-1] in _SHAPING:
                for argument in node.args:
                    parts = [script.code(each) for each in script.inside(argument.value)]
                    if sizes & {part for part in parts if not part.isdigit() or part == parts[0]}:
                        return script.code(node)
        return None

    def _keeps_means(self, call: cst.Call) -> bool:
        """Whether what is appended is a mean of a batch, so a number that can be averaged over ranks."""
        if len(call.args) != 1:
            return False
        value = call.args[0].value
        return isinstance(value, cst.Call) and self._work.losses.kind(value).name == MEAN

    def _is_read_behind(self, name: cst.Name, loop: Node) -> bool:
        script = self._script
        function = script.function(loop)
        last = script.inside(loop)[-1]
        around: Node = function if function is not None else script.module
        for node in script.inside(around):
            is_same = isinstance(node, cst.Name) and node.value == name.value and script.function(node) is function
            if is_same and script.order(node) > script.order(last):
                parent = script.parent(node)
                return not isinstance(parent, cst.AssignTarget | cst.For | cst.AsName)
        return False
