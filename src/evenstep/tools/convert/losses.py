"""What a number in a training script is: a mean over the batch's samples, a sum over them, or neither.

A gradient and a printed loss are right on several ranks only if ranks are weighted by what the number was averaged
over. That is read from how the number is computed.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import libcst as cst

from evenstep.tools.convert.source import Node, Script
from evenstep.tools.convert.values import Flow, Values, arguments

MEAN, SUM, CONSTANT, NOTHING, UNKNOWN, PAIRS = "mean", "sum", "constant", "nothing", "unknown", "pairs"
_ZERO = re.compile(r"0(\.0*)?|torch\.(zeros\(.*\)|tensor\(0(\.0*)?\b.*\))")
_NOISE = ("torch.rand", "torch.normal", "torch.bernoulli", "numpy.random.")
_PDIST = "torch.nn.functional.pdist"
_DEPTH = 12  # of names and functions that are followed
# Functions of torch.nn.functional and classes of torch.nn whose result is a mean unless `reduction` says otherwise.
_FUNCTIONAL = {
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "kl_div",
    "ctc_loss",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
    "cosine_embedding_loss",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "poisson_nll_loss",
    "multi_margin_loss",
    "soft_margin_loss",
    "multilabel_soft_margin_loss",
    "gaussian_nll_loss",
}
_KEEPING = {
    "detach",
    "item",
    "float",
    "cpu",
    "double",
    "to",
    "half",
    "data",
    "clone",
    "scale",
    "squeeze",
    "view",
    "abs",
}


@dataclass(frozen=True)
class Kind:
    """What a number is.

    Attributes:
        name: MEAN, SUM, CONSTANT (the same on all ranks), NOTHING (0), PAIRS (each sample is compared with all),
            UNKNOWN.
        weight: What a mean was averaged over, as an expression, where it isn't the batch's samples.
    """

    name: str
    weight: str | None = None


def combined(left: Kind, right: Kind) -> Kind:
    """Of a sum of two terms."""
    if left.name == NOTHING or left == right:
        return right
    if right.name == NOTHING:
        return left
    if CONSTANT in (left.name, right.name):
        other = right if left.name == CONSTANT else left
        return Kind(UNKNOWN) if other.name == SUM else other  # a sum over ranks would have the constant several times
    for name in (PAIRS, UNKNOWN):
        if name in (left.name, right.name):
            return Kind(name)
    # Means over different numbers can't be weighted by one of them; sums and means can't be added over ranks alike.
    return Kind(UNKNOWN)


def _alike(kinds: list[Kind]) -> Kind:
    """Of an expression that may be any of several."""
    return kinds[0] if kinds and all(each == kinds[0] for each in kinds) else Kind(UNKNOWN)


def is_reduction(node: Node, names: tuple[str, ...] = ("mean", "sum")) -> bool:
    """Whether an expression is a call such as `x.mean()` or `torch.sum(x, 1)`."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in names


class Losses:
    """Reads expressions of a script."""

    def __init__(self, script: Script, flow: Flow) -> None:
        self.script = script
        self.flow = flow
        self._has_ignored = any(isinstance(n, cst.UnaryOperation) and script.code(n) == "-100" for n in script.nodes)
        self._kinds: dict[Node, Kind] = {}
        self._batches: dict[Node, frozenset[Node | None]] = {}

    # ------------------------------------------------------------------ where a name was last assigned

    def reaching(self, name: cst.Name) -> list[tuple[Node, bool]]:
        """The expressions that a name may hold at its place, and whether each was added to what it held before."""
        script = self.script
        scope = script.scope(name.value, name)
        targets = [node for node in script.bindings.get(scope, {}).get(name.value, []) if isinstance(node, cst.Name)]
        if script.function(name) is not scope:
            before = targets
        else:
            statement = script.statement(name)
            before = [node for node in targets if script.order(script.statement(node)) < script.order(statement)]
            if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1:
                before += [node for node in targets if script.statement(node) is statement and node is not name]
        found: list[tuple[Node, bool]] = []
        for target in reversed(before):
            assigned, adds = self._assigned(target)
            if assigned is None:
                loop = next((each for each in script.ancestors(target) if isinstance(each, cst.For)), None)
                if loop is not None and script.is_inside(target, loop.target) and script.is_inside(name, loop.body):
                    break
                continue
            found.append((assigned, adds))
            statement = script.statement(target)
            if not adds and script.parent(statement) in set(script.ancestors(name)):
                break
        return found

    def _assigned(self, target: cst.Name) -> tuple[Node | None, bool]:
        for node in self.script.ancestors(target):
            match node:
                case cst.AugAssign():
                    return (node.value, True) if isinstance(node.operator, cst.AddAssign) else (None, False)
                case cst.Assign():
                    index = self._index(target, node.targets[0].target)
                    if index is not None and isinstance(node.value, cst.Tuple) and index < len(node.value.elements):
                        return node.value.elements[index].value, False
                    return node.value, False
                case cst.AnnAssign() | cst.NamedExpr():
                    return node.value, False
                case cst.For() | cst.With() | cst.FunctionDef():
                    return None, False
        return None, False

    def _index(self, target: cst.Name, assigned: Node) -> int | None:
        if not isinstance(assigned, cst.Tuple | cst.List):
            return None
        for index, element in enumerate(assigned.elements):
            if self.script.is_inside(target, element):
                return index
        return None

    # ------------------------------------------------------------------ kinds

    def kind(self, node: Node, depth: int = 0) -> Kind:
        """What a number is."""
        if depth > _DEPTH:
            return Kind(UNKNOWN)
        if node not in self._kinds:
            self._kinds[node] = Kind(UNKNOWN)  # while it is being read, should it hang on itself
            self._kinds[node] = self._read(node, depth)
        return self._kinds[node]

    def _read(self, node: Node, depth: int) -> Kind:
        if not self.varies(node):
            return Kind(NOTHING if _ZERO.fullmatch(self.script.code(node)) else CONSTANT)
        match node:
            case cst.Name():
                return self._of_name(node, depth)
            case cst.Attribute() if node.attr.value == "data":
                return self.kind(node.value, depth + 1)
            case cst.UnaryOperation():
                return self.kind(node.expression, depth + 1)
            case cst.BinaryOperation():
                return self._of_operation(node, depth)
            case cst.Call():
                return self._of_call(node, depth)
            case cst.IfExp():
                return _alike([self.kind(node.body, depth + 1), self.kind(node.orelse, depth + 1)])
        return Kind(SUM if self.is_size(node) else UNKNOWN)

    def varies(self, node: Node) -> bool:
        """Whether an expression depends on a rank's samples, or on random numbers: it isn't the same on all ranks."""
        return bool(self.batches(node))

    def batches(self, node: Node) -> frozenset[Node | None]:
        """What the batches that an expression depends on are taken from; None among them: random numbers."""
        if node not in self._batches:
            seen: set[Node] = set()
            found: set[Node | None] = set()
            waiting = [node]
            # A function that is called is given what its call shows; the expression's own, what any call gives.
            callers = {self.script.function(node)}
            while waiting:
                each = waiting.pop()
                for inner in self.script.inside(each) if each not in seen else ():
                    function = self.script.function(inner)
                    found |= {
                        site
                        for site in self._taken(inner)
                        if function in callers or site is None or self.script.is_inside(site, function or site)
                    }
                    waiting += self._sources(inner)
                    given = self.given(inner) if isinstance(inner, cst.Name) and function in callers else None
                    for value in filter(None, given or ()):
                        callers.add(self.script.function(value))
                        waiting.append(value)
                seen.add(each)
            self._batches[node] = frozenset(found)
        return self._batches[node]

    def _taken(self, node: Node) -> set[Node | None]:
        if isinstance(node, cst.Call) and self.draws_noise(node):
            return {None}
        if not isinstance(node, cst.Call) and not (isinstance(node, cst.Name) and self.script.is_read(node)):
            return set()
        sites = {value.site for value in self.flow.of(node, "batch")}
        # Another loop's batch may have had the same name.
        for around in self.script.ancestors(node) if len(sites) > 1 else ():
            own = {site for site in sites if self.script.is_inside(site, around)}
            if own and isinstance(around, cst.For | cst.While | cst.BaseComp):
                return {*own}
        return {*sites}

    def draws_noise(self, call: cst.Call) -> bool:
        """Whether random numbers are drawn again and again, as for samples: in a loop, a forward pass or a data set."""
        function = self.script.function(call)
        if not (self.script.qualified(call.func) or "").startswith(_NOISE):
            return False
        if self.script.loops(call) or function is None:
            return bool(self.script.loops(call))
        is_forward = self.flow.is_module_class(self.script.class_of(function)) and function.name.value != "__init__"
        calls = self.flow.calls.get(function, ())
        return is_forward or function.name.value == "__getitem__" or any(map(self.script.loops, calls))

    def is_of_samples(self, node: Node) -> bool:
        """Whether an expression is a batch or a part of one, or draws random numbers."""
        return bool(self._taken(node))

    def _sources(self, node: Node) -> list[Node]:
        """What an expression is made of, elsewhere in the script."""
        if isinstance(node, cst.Call):
            return self.results(node)
        if not isinstance(node, cst.Name) or not self.script.is_read(node):
            return []
        loops = [self.script.parent(by) for by in self.script.bound(node.value, node)]
        iterated = [loop.iter for loop in loops if isinstance(loop, cst.For | cst.CompFor)]
        return [*(value for value, _ in self.reaching(node)), *iterated]

    def is_size(self, node: Node) -> bool:
        """Whether an expression is the number of samples of a batch: `len(x)`, `x.size(0)`, `x.shape[0]`."""
        code = self.script.code
        match node:
            case cst.Call(func=cst.Name(value="len")) if node.args:
                return self.flow.is_a(node.args[0].value, "batch")
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="size" | "numel" | "nelement"))):
                return self.flow.is_a(base, "batch") and [code(each.value) for each in node.args] in ([], ["0"])
            case cst.Call() if self.script.qualified(node.func) == "torch.numel" and node.args:
                return self.flow.is_a(node.args[0].value, "batch")
            case (
                cst.Subscript(value=cst.Attribute(value=base, attr=cst.Name(value="shape")))
                | cst.Subscript(value=cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="size"))))
            ):
                return self.flow.is_a(base, "batch") and code(node.slice[0]) == "0"
            case cst.Name():
                found = self.reaching(node)
                return bool(found) and all(not adds and self.is_size(value) for value, adds in found)
        return False

    def _of_name(self, node: cst.Name, depth: int) -> Kind:
        if self.is_size(node):
            return Kind(SUM)
        found = self.reaching(node)
        if not found:
            if self.flow.is_a(node, "batch"):
                return Kind(UNKNOWN)
            given = self.given(node)
            kinds = [Kind(CONSTANT) if value is None else self.kind(value, depth + 1) for value in given or ()]
            return Kind(CONSTANT) if given is None else _alike(kinds)
        kinds = [self._of_assigned(node.value, value, depth + 1) for value, _ in found]
        result = kinds[0]
        for each, (_, adds) in zip(kinds[1:], found[1:], strict=True):
            was_added = adds or found[0][1]
            result = combined(result, each) if was_added or each != result else result
        return result

    def _of_assigned(self, name: str, value: Node, depth: int) -> Kind:
        """What a name holds that a value was assigned to, perhaps with others: `logits, loss = model(x, y)`."""
        assign = self.script.parent(value)
        if isinstance(value, cst.Call) and isinstance(assign, cst.Assign):
            target = assign.targets[0].target
            if isinstance(target, cst.Tuple | cst.List):
                for index, element in enumerate(target.elements):
                    if isinstance(element.value, cst.Name) and element.value.value == name:
                        return self._of_part(value, index, depth)
        return self.kind(value, depth)

    def given(self, name: cst.Name) -> list[Node | None] | None:
        """What the calls of the function give to a parameter of this name (None: its default); None of other names."""
        scope = self.script.scope(name.value, name)
        if scope is None or not any(
            isinstance(by, cst.Param) for by in self.script.bindings.get(scope, {}).get(name.value, [])
        ):
            return None
        names = [each.name.value for each in scope.params.params]
        if self.script.class_of(scope) is not None:
            names = names[1:]
        given = [arguments(call, names).get(name.value) for call in self.flow.calls.get(scope, [])]
        return [each if each is None else each.value for each in given]

    def _of_operation(self, node: cst.BinaryOperation, depth: int) -> Kind:
        left, right = self.kind(node.left, depth + 1), self.kind(node.right, depth + 1)
        match node.operator:
            case cst.Add() | cst.Subtract():
                return combined(left, right)
            case cst.Multiply():
                if CONSTANT in (left.name, right.name):
                    return right if left.name == CONSTANT else left
                if Kind(MEAN) in (left, right) and (self.is_size(node.left) or self.is_size(node.right)):
                    return Kind(SUM)
            case cst.Divide():
                if right.name == CONSTANT:
                    return left
                if left.name == SUM and self.is_size(node.right):
                    return Kind(MEAN)
                count = self._unbounded(node.right)
                if left.name == SUM and self.kind(count, depth + 1).name == SUM and not self._is_of_model(count):
                    return Kind(MEAN, self.script.code(count))
        return Kind(UNKNOWN)

    def _unbounded(self, node: Node) -> Node:
        """A count without what keeps it from being 0: a rank may have none, and then counts as none."""
        match node:
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="clamp" | "clamp_min" | "clip"))):
                return self._unbounded(base)
            case cst.Call(func=cst.Name(value="max")):
                return next((each.value for each in node.args if self.varies(each.value)), node)
            case cst.BinaryOperation(operator=cst.Add()) if self.varies(node.left) != self.varies(node.right):
                return self._unbounded(node.left if self.varies(node.left) else node.right)
        return node

    def _is_of_model(self, node: Node) -> bool:
        """Whether a gradient flows through a number that divides: then it is no weight, which has none."""
        return any(self.flow.is_module(value) for each in self.flowing(node) for value in self.flow.of(each))

    def _of_call(self, node: cst.Call, depth: int) -> Kind:
        script, func = self.script, node.func
        if self.is_size(node):
            return Kind(SUM)
        name = script.qualified(func) or ""
        short = script.code(func).rsplit(".", 1)[-1]
        if short in _FUNCTIONAL and ("functional" in name or name.startswith("torch.")):
            return self._of_criterion(node, node.args, short)
        if is_reduction(node):
            return self._of_reduction(node, is_function=bool(name), depth=depth)
        inner = self._unbounded(node)
        if inner is not node:
            return self.kind(inner, depth + 1)
        if isinstance(func, cst.Name) and short in ("float", "int", "round") and node.args:
            return self.kind(node.args[0].value, depth + 1)
        if isinstance(func, cst.Attribute) and short in _KEEPING:
            is_scaling = short == "scale" and node.args
            return self.kind(node.args[0].value if is_scaling else func.value, depth + 1)
        for value in self.flow.of(func):
            if value.kind == "object":
                return self._of_criterion_object(node, value.site, value.definition, depth)
            if value.kind == "function" and isinstance(value.site, cst.FunctionDef):
                return self._of_function(value.site, node, depth)
        return Kind(UNKNOWN)

    def _of_reduction(self, node: cst.Call, *, is_function: bool, depth: int) -> Kind:
        """`x.mean()`, `torch.sum(x, 1)`: the first that takes the samples' dimension decides."""
        assert isinstance(node.func, cst.Attribute)
        given = arguments(node, ("input", "dim") if is_function else ("dim",))
        operand = node.func.value if not is_function else given["input"].value if "input" in given else node
        inner = self.kind(operand, depth + 1)
        if inner.name in (MEAN, SUM):
            return inner
        dims = next((self.script.code(given[name].value) for name in ("dim", "axis") if name in given), "0")
        if "0" not in dims.strip("()[]").replace(" ", "").split(","):
            return Kind(UNKNOWN)
        return Kind(MEAN if node.func.attr.value == "mean" else SUM)

    def _of_function(self, function: cst.FunctionDef, call: cst.Call, depth: int, index: int | None = None) -> Kind:
        """What a function of the script returns, or, of several values that it returns, the one at `index`."""
        kinds = []
        for node in self.script.inside(function):
            if isinstance(node, cst.Return) and self.script.function(node) is function and node.value is not None:
                value: Node = node.value
                if index is not None:
                    if not isinstance(value, cst.Tuple) or index >= len(value.elements):
                        return Kind(UNKNOWN)
                    value = value.elements[index].value
                kinds.append(self.kind(value, depth + 1))
        return self._said_outside(_alike(kinds), function, call)

    def _said_outside(self, kind: Kind, function: cst.FunctionDef, call: cst.Call) -> Kind:
        """A weight in the caller's words; UNKNOWN if it hangs on what only the function has."""
        if kind.weight is None:
            return kind
        names = [each.name.value for each in (*function.params.posonly_params, *function.params.params)]
        given = arguments(call, names[1:] if self.script.class_of(function) is not None else names)
        said = {name: ast.parse(self.script.code(each.value), mode="eval").body for name, each in given.items()}
        expression = ast.parse(kind.weight, mode="eval")
        own = {each.id for each in ast.walk(expression) if isinstance(each, ast.Name)} - said.keys()
        if own & self.script.bindings.get(function, {}).keys():
            return Kind(UNKNOWN)
        return Kind(kind.name, ast.unparse(_Renaming(said).visit(expression)))

    def _of_part(self, call: cst.Call, index: int, depth: int) -> Kind:
        """One of several values that a function of the script, or a module's forward pass, returns."""
        for value in self.flow.of(call.func):
            function: Node | None = value.site if value.kind == "function" else None
            if value.kind == "object" and value.definition is not None:
                function = forward_of(value.definition)
            if isinstance(function, cst.FunctionDef):
                return self._of_function(function, call, depth, index)
        return Kind(UNKNOWN)

    def _of_criterion_object(self, call: cst.Call, site: Node, definition: cst.ClassDef | None, depth: int) -> Kind:
        if definition is not None:
            forward = forward_of(definition)
            return Kind(UNKNOWN) if forward is None else self._of_function(forward, call, depth)
        if not isinstance(site, cst.Call):
            return Kind(UNKNOWN)
        name = self.script.qualified(site.func) or ""
        if name.startswith("torch.nn.") and name.endswith("Loss"):
            holder = self.script.code(call.func)
            return self._of_criterion(call, site.args, name.rsplit(".", 1)[-1], holder=holder)
        return Kind(UNKNOWN)

    def _of_criterion(self, call: cst.Call, settings: object, name: str, *, holder: str | None = None) -> Kind:
        given = {arg.keyword.value: arg.value for arg in settings if arg.keyword is not None}  # type: ignore[attr-defined]
        words = [self.script.code(given[key]).strip("'\"") for key in ("reduction", "size_average") if key in given]
        if "sum" in words or "False" in words:
            return Kind(SUM)
        if not {*words} <= {"mean", "batchmean", "True"} or "reduce" in given:
            return Kind(UNKNOWN)
        if len(call.args) < 2:
            return Kind(MEAN)
        target = call.args[1].value
        if name in ("cross_entropy", "CrossEntropyLoss") and self._counts_the_batch(target):
            return Kind(PAIRS)
        if name in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"):
            text = self.script.code(target)
            first = [each.value for each in settings if each.keyword is None]  # type: ignore[attr-defined]
            unnamed = first[2:3] if holder is None else first[:1]
            weights = given.get("weight") or next(iter(unnamed), None)
            if weights is not None:
                said = self.script.code(weights) if holder is None else f"{holder}.weight"
                return Kind(UNKNOWN) if "ignore_index" in given else Kind(MEAN, f"{said}[{text}].sum()")
            # Targets in one row are those of tokens or pixels, of which some may be left out.
            is_row = isinstance(target, cst.Call) and text.endswith(("view(-1)", "reshape(-1)", "flatten()"))
            if "ignore_index" in given or is_row or self._has_ignored:
                ignored = self.script.code(given["ignore_index"]) if "ignore_index" in given else "-100"
                return Kind(MEAN, f"({text} != {ignored}).sum()")
        return Kind(MEAN)

    def _counts_the_batch(self, target: Node, depth: int = 0) -> bool:
        """Whether targets are 0, 1, 2, ...: each sample's partner among the batch."""
        if depth > 3:
            return False
        if isinstance(target, cst.Name):
            return any(self._counts_the_batch(value, depth + 1) for value, _ in self.reaching(target))
        if isinstance(target, cst.Call):
            if (self.script.qualified(target.func) or "") == "torch.arange":
                return True
            if isinstance(target.func, cst.Attribute):
                return self._counts_the_batch(target.func.value, depth + 1)
        return False

    def compares_pairs(self, loss: Node) -> bool:
        """Whether a loss compares the samples of a batch with each other: `cdist`, or `z @ z.T`."""
        script, nodes = self.script, self.flowing(loss)
        for call in [each for each in nodes if isinstance(each, cst.Call)]:
            for value in self.flow.of(call.func):
                forward = None if value.definition is None else forward_of(value.definition)
                nodes |= set() if forward is None else set(script.inside(forward))
        for node in nodes:
            left: Node = node
            right = None
            match node:
                case cst.Call() if (script.qualified(node.func) or "") in ("torch.cdist", _PDIST):
                    return True
                case cst.BinaryOperation(operator=cst.MatrixMultiply()):
                    left, right = node.left, node.right
                case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="mm" | "matmul"))) if node.args:
                    given = [each.value for each in node.args]
                    left, right = given if len(given) == 2 else (base, given[0])
            said = "" if right is None else script.code(right)
            if isinstance(left, cst.Name) and said in (f"{left.value}.T", f"{left.value}.t()"):
                return True
        return False

    def is_criterion(self, call: cst.Call) -> bool:
        """Whether a call is one of torch's losses."""
        sites = [value.site for value in self.flow.of(call.func, "object")]
        names = [self.script.qualified(each.func) or "" for each in [call, *sites] if isinstance(each, cst.Call)]
        return any(name.rsplit(".", 1)[-1] in _FUNCTIONAL or name.endswith("Loss") for name in names)

    # ------------------------------------------------------------------ gradients

    def flowing(self, node: Node) -> set[Node]:
        """The expressions that a gradient flows back through from a loss."""
        seen: set[Node] = set()
        waiting: list[Node] = [node]
        while waiting:
            each = waiting.pop()
            match each:
                case cst.Call(func=cst.Attribute(attr=cst.Name(value="detach" | "item" | "numpy" | "tolist"))):
                    continue
                case cst.Attribute(attr=cst.Name(value="data")):
                    continue
                case _ if each in seen:
                    continue
                case cst.Name():
                    held = [value for value, _ in self.reaching(each)] or [
                        value for value in self.given(each) or () if value
                    ]
                    waiting += [value for value in held if not self._is_without_grad(value)]
                case _:
                    waiting += [*self.script.parts(each), *(self.results(each) if isinstance(each, cst.Call) else ())]
            seen.add(each)
        return seen

    def models(self, node: Node, trained: Values) -> Values:
        """The trained models that a loss goes through, as far as its gradient flows."""
        return frozenset(value for each in self.flowing(node) for value in self.flow.of(each) if value in trained)

    def results(self, call: cst.Call) -> list[Node]:
        """What the script's own functions return, and what its own criteria compute."""
        results: list[Node] = []
        for value in self.flow.of(call.func):
            if isinstance(value.site, cst.FunctionDef) and not self._has_no_grad(value.site):
                results += [
                    node.value
                    for node in self.script.inside(value.site)
                    if isinstance(node, cst.Return) and node.value is not None
                ]
        return results

    def _is_without_grad(self, node: Node) -> bool:
        is_copy = isinstance(node, cst.Call) and self.script.qualified(node.func) == "copy.deepcopy"
        return is_copy or any(
            isinstance(each, cst.With) and any("no_grad" in self.script.code(item.item) for item in each.items)
            for each in self.script.ancestors(node)
        )

    def _has_no_grad(self, function: cst.FunctionDef) -> bool:
        return any("no_grad" in self.script.code(each.decorator) for each in function.decorators)


def forward_of(definition: cst.ClassDef) -> cst.FunctionDef | None:
    """The forward pass that a class defines itself."""
    for node in definition.body.body:
        if isinstance(node, cst.FunctionDef) and node.name.value == "forward":
            return node
    return None


class _Renaming(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, said: dict[str, ast.expr]) -> None:
        self._said = said

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._said.get(node.id, node)
