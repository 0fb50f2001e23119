"""The loops of a script: which train and which evaluate, what a batch weighs, and the numbers that they add up."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from evenstep.tools.convert.losses import CONSTANT, MEAN, PAIRS, SUM, UNKNOWN, Kind, forward_of, is_reduction
from evenstep.tools.convert.source import Node, Statement, target_names
from evenstep.tools.convert.values import BUILTINS, PASSING, Value, Values, arguments
from evenstep.tools.convert.work import Work

_SHAPING = {"view", "reshape", "ones", "zeros", "full", "rand", "randn", "randint", "expand", "repeat", "init_hidden"}
# Methods that use up a number without keeping it.
_STEPPING = {"backward", "zero_grad", "train", "eval", "unscale_", "add_", "mul_", "copy_", "clamp_", "fill_"}
_PURE = ("torch.", "numpy.", "math.")


@dataclass(frozen=True)
class Pass:
    """A call of `backward`.

    Attributes:
        call: The call.
        loss: What it is called on, without a scaler around it.
        scaler: The scaler's name, if there is one.
        weight: What the loss was averaged over, as an expression.
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
        flowing: The expressions that gradients flow through.
        whole: Mentions of loaders that are divided, where whole batches are taken all the same.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script, self._flow = work.script, work.flow
        self.passes: list[Pass] = []
        for call in work.calls():
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
                self._read_pass(call)
        self.training: set[Node] = {loop for each in self.passes for loop in each.loops}
        self.flowing = {node for each in self.passes for node in work.losses.flowing(each.loss)}
        self.evaluating = [
            node
            for node in self._script.nodes
            if isinstance(node, cst.For | cst.CompFor)
            and node not in self.training
            and self._in_head(node)
            # What a generator passes on is judged where it arrives.
            and not any(isinstance(each, cst.Yield) for each in self._script.inside(node))
        ]
        self.whole: set[Node] = set()
        self._added: set[tuple[Node | None, str]] = set()  # sums that are those of all ranks

    # ------------------------------------------------------------------ loaders of loops

    def loaders(self, loop: Node) -> Values:
        """The loaders whose batches a loop takes."""
        sources = self._sources(loop)
        return frozenset().union(*(self._flow.loaders(node) for node in sources))

    def _sources(self, loop: Node) -> list[cst.BaseExpression]:
        """What a loop takes batches from: in its head, or by `next` in its body."""
        found = self._in_head(loop) if isinstance(loop, cst.For | cst.CompFor) else []
        if isinstance(loop, cst.For | cst.While) and not found:
            for node in self._script.inside(loop.body):
                is_next = isinstance(node, cst.Call) and self._script.code(node.func) == "next" and bool(node.args)
                if is_next and self._flow.loaders(node.args[0].value):  # type: ignore[attr-defined]
                    found.append(node.args[0].value)  # type: ignore[attr-defined]
        return found

    def _in_head(self, loop: cst.For | cst.CompFor) -> list[cst.BaseExpression]:
        """What a loop takes batches from one by one; `list` and `cycle` keep them, and `len` takes none."""
        script, flow = self._script, self._flow
        found: list[cst.BaseExpression] = []
        waiting: list[cst.BaseExpression] = [loop.iter]
        while waiting:
            node = waiting.pop()
            if flow.loaders(node):
                found.append(node)
            if isinstance(node, cst.Call) and script.code(node.func).rsplit(".", 1)[-1] in PASSING | {
                "enumerate",
                "zip",
            }:
                waiting += [argument.value for argument in node.args]
        return found

    def at(self, node: Node, depth: int = 0) -> frozenset[Node]:
        """The loops over loaders in whose round a place is, also by way of the functions that hold it."""
        around = [loop for loop in self._script.loops(node) if self.loaders(loop)]
        if around or depth > 4:
            return frozenset(around[:1])
        function = self._script.function(node)
        calls = self._flow.calls.get(function, ()) if function is not None else ()
        return frozenset().union(*(self.at(call, depth + 1) for call in calls))

    def taken_from(self, node: Node) -> list[Node]:
        """What the batches that a number is of are taken from."""
        found = [site for site in self._work.losses.batches(node) if site is not None]
        return found or [source for loop in self.at(node) for source in self._sources(loop)]

    def num_samples(self, sites: list[Node], at: Node) -> str | None:
        """The samples of the batch that is taken from these, as an expression; None where its loader has no name.

        The loader counts them: a tensor's first dimension may be anything.
        """
        script, flow = self._script, self._flow
        loaders = {flow.loaders(site) for site in sites}
        if len(loaders) != 1:
            return None
        values, function = loaders.pop(), script.function(at)
        names = (cst.Name, cst.Attribute, cst.Subscript)
        own = {
            script.code(site)
            for site in sites
            if isinstance(site, names) and flow.of(site) == values and script.function(site) is function
        }
        name = own.pop() if len(own) == 1 else flow.name_of(values, at)
        return None if name is None else f"{name}.num_samples"

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
        loops = self.at(call)
        reason = self._why_not_trained(call, loops)
        if reason is not None:
            work.refuse(call, reason)
            return
        kind = work.losses.kind(loss)
        if kind.name == PAIRS or work.losses.compares_pairs(loss):
            work.refuse(
                call,
                "each sample is compared with all others of its batch, so ranks would compare theirs with fewer: "
                "gather the features of all ranks first (docs/how-to/contrastive.md)",
            )
            return
        num_samples = self.num_samples(self.taken_from(loss), call)
        if num_samples is None:
            text = "the loader of this batch has no name here, and it counts what the loss is averaged over"
            work.refuse(call, f"{text}: loop over one DataLoader that has a name, or pass it to the function")
            return
        if kind.name in (UNKNOWN, CONSTANT):
            work.note(
                call, "the loss is taken to be the mean over the batch's samples; evenstep verify tells", mark=True
            )
        self._remark_on(call, loss, kind, loops)
        self.passes.append(Pass(call, loss, scaler, kind.weight or num_samples, kind, loops))

    def _why_not_trained(self, call: cst.Call, loops: frozenset[Node]) -> str | None:
        """Why a backward pass has no batch of a loader, or takes only a part of one."""
        script = self._script
        for loop in script.loops(call):
            if loop in loops:
                break
            head = loop.iter if isinstance(loop, cst.For) else loop.test
            is_over_time = re.search(r"\.(size\(|shape\[)[-1-9]", script.code(head))
            if loops and self._work.losses.varies(head) and not is_over_time:
                return (
                    "this loop cuts its batch into parts, of which ranks would have different numbers: train on whole "
                    "batches, or see model.microbatches"
                )
        shaped = next((found for loop in loops if (found := self.counts_on_size(loop)) is not None), None)
        if shaped is not None:
            return (
                f"{shaped} counts on whole batches, and a rank has fewer samples: take their number from the batch at "
                f"hand (x.size(0))"
            )
        if loops:
            return None
        return (
            "no torch DataLoader of this file, which alone is read and changed, gives this loss its batches one by "
            "one: make it here, loop over it, and unpack its batches"
        )

    def _remark_on(self, call: cst.Call, loss: Node, kind: Kind, loops: frozenset[Node]) -> None:
        """Say what may make a loss another one on a part of a batch."""
        work, losses = self._work, self._work.losses
        flowing = losses.flowing(loss)
        names = ("mean", "sum", "std", "var", "topk", "median", "quantile")
        for node in (each for each in flowing if is_reduction(each, names)):
            if losses.kind(node).name not in (MEAN, SUM) and self._script.code(node.func).endswith(("mean", "sum")):  # type: ignore[attr-defined]
                continue
            if any(isinstance(each, cst.Call) and each is not node and self._takes(each, node) for each in flowing):
                work.note(node, "this statistic inside the loss is one of each rank's part of the batch", mark=True)
        squeezed = next((each for each in flowing if self._script.code(each).endswith(".squeeze()")), None)
        if squeezed is not None:
            work.note(squeezed, "squeeze() also leaves out the dimension of samples where a rank has one: squeeze(1)")
        for loop in loops:
            for value in self.loaders(loop):
                given = arguments(value.site, ()) if isinstance(value.site, cst.Call) else {}
                if "collate_fn" in given and kind.weight is None:
                    text = "the loss is weighted by samples: if they have different lengths, weight it by what it is"
                    work.note(call, f"{text} averaged over")

    def _takes(self, call: cst.Call, node: Node) -> bool:
        """Whether a criterion or a reduction is given something that a statistic went into."""
        losses = self._work.losses
        if losses.kind(call).name not in (MEAN, SUM) or not (is_reduction(call) or losses.is_criterion(call)):
            return False
        if self._script.is_inside(call, node):
            return False
        given = [argument.value for argument in call.args]
        if isinstance(call.func, cst.Attribute) and is_reduction(call):
            given.append(call.func.value)
        # A mean of what is one number already is no statistic of samples.
        return any(node in losses.flowing(each) and losses.kind(each).name not in (MEAN, SUM) for each in given)

    # ------------------------------------------------------------------ numbers that are added up and shown

    def average_metrics(self, divided: Values) -> None:
        """Have the numbers that are printed or kept be those of all ranks.

        Args:
            divided: Loaders that are divided over ranks.
        """
        work, script = self._work, self._script
        for call in work.calls():
            if script.code(call.func).endswith(".item") or script.code(call.func) == "float":
                self._average(call, divided)
        for node in script.nodes:
            if isinstance(node, cst.For | cst.While) and (loaders := self.loaders(node)) and loaders <= divided:
                self._add_up(node, divided)
        for node in script.nodes:
            is_test = isinstance(node, cst.If | cst.While) and self._decides(node.test) and bool(script.loops(node))
            if is_test and self._is_divided(node.test, divided) and not self._is_known(node.test):  # type: ignore[attr-defined]
                work.note(node, "each rank decides this by its own samples", mark=True)
            if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call) and self._keeps(node.value):
                unknown = self._unknown(node.value, divided)
                if unknown:
                    text = ", ".join(dict.fromkeys(script.code(each) for each in unknown))
                    work.note(node, f"{text}: of rank 0's samples alone", mark=True)

    def _decides(self, test: Node) -> bool:
        """Whether a test is one of values, and not of what there is: `x is None`, `isinstance(x, list)`."""
        code = self._script.code(test)
        return not re.search(r"\bis\b|\b(isinstance|hasattr|callable)\(", code)

    def _is_divided(self, node: Node, divided: Values) -> bool:
        sites = [site for site in self.taken_from(node) if not self.whole & {*self._script.inside(site)}]
        loaders = frozenset().union(*(self._flow.loaders(site) for site in sites))
        return bool(loaders) and loaders <= divided

    def _average(self, node: Node, divided: Values) -> bool:
        """Have a mean of this rank's samples be that of all; returns whether it is one."""
        kind = self._work.losses.kind(node)
        if kind.name != MEAN or node in self.flowing or self._is_known(node) or self._is_in_sum(node):
            return False
        weight = kind.weight or self.num_samples(self.taken_from(node), node)
        if weight is None or not self._is_divided(node, divided):
            return False
        self._work.average(node, weight)
        return True

    def _is_known(self, node: Node, depth: int = 0) -> bool:
        """Whether an expression is the same on all ranks, after the changes so far."""
        script, losses = self._script, self._work.losses
        if node in self._work.collectives or not losses.varies(node):
            return True
        if depth > 8 or losses.is_of_samples(node):
            return False
        parts: list[Node] = [*script.parts(node)]
        if isinstance(node, cst.Name):
            parts = [value for value, _ in losses.reaching(node)]
            if (script.scope(node.value, node), node.value) in self._added:
                return True
            parts = parts or [each for each in losses.given(node) or () if each is not None]
        elif isinstance(node, cst.Call):
            parts += losses.results(node)
        return bool(parts) and all(self._is_known(part, depth + 1) for part in parts)

    def _is_in_sum(self, node: Node) -> bool:
        """Whether a number is a factor of one that is added up over ranks later: `loss.item() * len(x)`."""
        for each in self._script.ancestors(node):
            if isinstance(each, cst.AugAssign):
                return self._work.losses.kind(each.value).name == SUM
            if isinstance(each, Statement):
                return False
        return False

    def _keeps(self, call: cst.Call) -> bool:
        """Whether a call is made to show or to keep what it is given."""
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        trains = any(self._script.is_inside(each.call, of) for each in self.passes for of in self._flow.functions(call))
        is_torchs = (self._script.qualified(call.func) or "").startswith("torch.")
        return method not in _STEPPING and not is_torchs and not trains

    def _unknown(self, call: cst.Call, divided: Values) -> list[Node]:
        """Make what a call is given numbers of all ranks; returns what can't be."""
        losses, given = self._work.losses, [each.value for each in call.args]
        if self._flow.functions(call):  # averages them itself, but not what it weights them by
            given = [each for each in given if losses.kind(each).name != MEAN]
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("append", "extend", "add", "insert"):
            holder = self._script.code(call.func.value)  # of tensors that a loss may be made of, which a mean isn't
            if any(self._script.code(each) == holder for each in self.flowing):
                return []
            return [each for each in given if self._is_divided(each, divided) and not self._is_known(each)]
        return [each for argument in given for each in self._shown(argument, divided)]

    def _shown(self, node: Node, divided: Values) -> list[Node]:
        """Have what is shown be the number of all ranks; returns what can't be."""
        losses = self._work.losses
        if self._is_known(node) or not self._is_divided(node, divided):
            return []
        if self._average(node, divided):
            return []
        if losses.kind(node).name == SUM:
            self._work.add_up(node)
            return []
        is_text = isinstance(node, cst.BaseString | cst.Tuple | cst.List | cst.Dict | cst.BinaryOperation) or (
            isinstance(node, cst.Call) and self._script.code(node.func).endswith((".format", "str", "round", "dict"))
        )
        if not is_text:
            return [node]
        return [unknown for part in self._script.parts(node) for unknown in self._shown(part, divided)]

    def accumulators(self, loop: Node) -> list[tuple[cst.AugAssign, Kind]]:
        """What a loop adds up, in its own function."""
        script, losses = self._script, self._work.losses
        found: list[tuple[cst.AugAssign, Kind]] = []
        for node in script.inside(loop):
            is_sum = isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign)
            if not is_sum or self.at(node) != {loop}:
                continue
            assert isinstance(node, cst.AugAssign)
            if node.value in self.flowing:  # a loss that is made of parts
                continue
            kind = losses.kind(node.value)
            if self._hangs_on_samples(node, loop):
                kind = Kind(UNKNOWN)
            found.append((node, kind))
        return found

    def _hangs_on_samples(self, node: cst.AugAssign, loop: Node) -> bool:
        """Whether what is added to, or how often, is decided by samples: `hits[label] += 1`, `if right: n += 1`."""
        losses = self._work.losses
        if isinstance(node.target, cst.Subscript) and any(losses.varies(each) for each in node.target.slice):
            return True
        for each in self._script.ancestors(node):
            if each is loop:
                break
            head = getattr(each, "test", None) or getattr(each, "iter", None)
            if head is not None and losses.varies(head) and not self._is_known(head):
                return not isinstance(head, cst.Call) or not self._script.code(head.func).endswith(".items")
        return False

    def _add_up(self, loop: Node, divided: Values) -> None:
        work, script = self._work, self._script
        added = self.accumulators(loop)
        unknown = next((node for node, kind in added if kind.name not in (MEAN, SUM, CONSTANT)), None)
        if unknown is not None:
            text = f"what {script.code(unknown.target)} adds up isn't understood"
            work.note(unknown, f"{text}: it and what is counted beside it are those of rank 0's samples", mark=True)
        for node, kind in added:
            self._average(node.value, divided)
            if kind.name != SUM or unknown is not None:  # a quotient of the two has to be one of the same samples
                continue
            name = script.code(node.target)
            if isinstance(node.target, cst.Name):
                self._added.add((script.scope(name, node), name))
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

    def why_whole(self, loop: Node, trained: Values) -> str | None:
        """Why every rank has to see all samples of a loop that doesn't train; None if each use of them is understood.

        Args:
            loop: Over a loader.
            trained: Models.
        """
        script, losses = self._script, self._work.losses
        if not isinstance(loop, cst.For):
            return "it makes a list of all batches"
        counted = self.counts_on_size(loop)
        if counted is not None:
            return f"{counted} counts on whole batches"
        if self.num_samples([*self._in_head(loop)], loop.body) is None:
            return "its loader has no name there"
        sums = dict(self.accumulators(loop))
        for node in script.inside(loop.body):
            match node:
                case cst.Yield():
                    return "it gives its batches to another loop"
                case cst.If() | cst.While() if losses.varies(node.test):
                    return f"what it does depends on samples: {script.code(node.test)}"
                case cst.For() if losses.varies(node.iter):
                    return f"it goes through samples one by one: {script.code(node.iter)}"
                case cst.AugAssign():
                    if node not in sums or sums[node].name not in (MEAN, SUM, CONSTANT):
                        return f"what {script.code(node.target)} adds up isn't understood"
                case cst.AssignTarget():
                    names = target_names(node.target)
                    kept = next((name.value for name in names if self._is_read_behind(name, loop)), None)
                    if kept is not None or not names:
                        return f"{kept or script.code(node.target)} is kept"
                case cst.Expr(value=cst.Call() as call) if not self._is_harmless(call):
                    return f"{script.code(call.func)} keeps what samples gave"
                case cst.Call() if not self._is_pure(node, trained):
                    return f"{script.code(node.func)} may keep what it is given"
        return None

    def _is_harmless(self, call: cst.Call) -> bool:
        """Whether a statement is given nothing of samples, or appends a mean, which can be that of all ranks."""
        losses, given = self._work.losses, [argument.value for argument in call.args]
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "append" and len(given) == 1:
            return isinstance(given[0], cst.Call) and losses.kind(given[0]).name == MEAN
        return not any(losses.varies(each) for each in given)

    def _is_pure(self, call: cst.Call, trained: Values, depth: int = 0) -> bool:
        """Whether a call is one of a module, of torch, or of a function that keeps nothing."""
        script, flow = self._script, self._flow
        name = script.qualified(call.func)
        if name is not None or (isinstance(call.func, cst.Name) and call.func.value in BUILTINS):
            return name is None or name.startswith(_PURE)
        held = [value for value in flow.of(call.func) if value.kind != "batch"]
        if held:
            return depth < 4 and all(
                value in trained or self._is_pure_value(value, trained, depth + 1) for value in held
            )
        if not isinstance(call.func, cst.Attribute):
            return False
        base = call.func.value
        return self._work.losses.varies(base) or call.func.attr.value == "append" or flow.is_a(base, "loader")

    def _is_pure_value(self, value: Value, trained: Values, depth: int) -> bool:
        function = value.site
        if value.kind == "object":
            function = forward_of(value.definition) if value.definition is not None else None  # type: ignore[assignment]
            if not self._flow.is_module(value) or function is None:
                return self._flow.is_module(value)
        return isinstance(function, cst.FunctionDef) and self._keeps_nothing(function, trained, depth)

    def _keeps_nothing(self, function: cst.FunctionDef, trained: Values, depth: int) -> bool:
        for node in self._script.inside(function.body):
            match node:
                case cst.Global() | cst.Nonlocal() | cst.AssignTarget(target=cst.Attribute() | cst.Subscript()):
                    return False
                case cst.AugAssign(target=cst.Attribute() | cst.Subscript()):
                    return False
                case cst.Expr(value=cst.Call() as call) if not self._is_harmless(call):
                    return False
                case cst.Call() if not self._is_pure(node, trained, depth):
                    return False
        return True

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
                inner = [part for argument in node.args for part in script.inside(argument.value)]
                parts = [script.code(part) for part in inner if not self._work.losses.varies(part)]
                first = script.code(node.args[0]).lstrip("([").split(",")[0] if node.args else ""
                if sizes & {part for part in (*parts, first) if not part.isdigit() or part == first}:
                    return script.code(node)
        return None

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
