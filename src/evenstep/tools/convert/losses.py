"""Whether a number in a training script is a mean over the batch's samples, a sum over them, or neither.

A gradient or a printed loss is right on several ranks only if each rank is weighted by the number that its loss was
averaged over. This module derives that weight from the code that computes the loss.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from evenstep.tools.convert.values import Flow
from evenstep.tools.reading.tree import Assignment, Node, target_names
from evenstep.tools.reading.tree import File as Script
from evenstep.tools.reading.values import Values, arguments

MEAN, SUM, CONSTANT, NOTHING, UNKNOWN = "mean", "sum", "constant", "nothing", "unknown"
_ZERO = re.compile(r"0(\.0*)?|torch\.(zeros\(.*\)|tensor\(0(\.0*)?\b.*\))")
_NOISE = ("torch.rand", "torch.normal", "torch.bernoulli", "numpy.random.")
_DEPTH = 12  # levels of expressions, names and functions that are followed
# Functions of torch.nn.functional that are losses, beside those whose names end with "_loss".
_FUNCTIONAL = {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
_KEEPING = {"detach", "item", "float", "cpu", "double", "to", "half", "clone", "scale", "squeeze", "view", "abs"}
_KEEPING |= {"numpy"}
# Reductions over all samples of a batch, unless they are passed another dimension. Those in `_ALONG` go over samples
# only if they are passed that dimension.
_STATISTICS = {"mean", "sum", "std", "var", "median", "max", "min", "amax", "amin", "norm", "topk", "quantile"}
_BEFORE_DIM = {"norm": ["p"], "topk": ["k"], "quantile": ["q"], "normalize": ["p"]}
# Operands that get a new axis, to compare all samples with all others: `z[None] - z[:, None]`.
_IN_FRONT = re.compile(r"\[None(, :|, \.\.\.)*\]$|\.unsqueeze\(0\)$")
_BEHIND = re.compile(r"\[:, None(, :|, \.\.\.)*\]$|\.unsqueeze\(1\)$")
_ALONG = {"softmax", "log_softmax", "softmin", "logsumexp", "normalize", "cumsum"}


@dataclass(frozen=True)
class Kind:
    """The kind of a number.

    Attributes:
        name: MEAN, SUM, CONSTANT (the same on all ranks), NOTHING (the number 0) or UNKNOWN.
        weight: An expression for the number that a mean was averaged over; None: the number of samples of the batch.
    """

    name: str
    weight: str | None = None


@dataclass(frozen=True)
class Definition:
    """An expression that a name may hold.

    Attributes:
        value: The expression.
        adds: Whether the expression was added to the name's earlier value.
        index: The index of the name's value in the tuple that the expression yields; None: all of it.
    """

    value: Node
    adds: bool = False
    index: int | None = None


def combined(left: Kind, right: Kind) -> Kind:
    """The kind of a sum of two terms."""
    if NOTHING in (left.name, right.name) or left == right:
        return right if left.name == NOTHING else left
    if CONSTANT in (left.name, right.name):
        other = right if left.name == CONSTANT else left
        return Kind(UNKNOWN) if other.name == SUM else other  # a sum over ranks would add the constant several times
    # Means over different numbers have no common weight, and a sum and a mean are combined over ranks differently.
    return Kind(UNKNOWN)


def _alike(kinds: list[Kind]) -> Kind:
    """The kind of an expression that may be any of several."""
    return kinds[0] if kinds and all(each == kinds[0] for each in kinds) else Kind(UNKNOWN)


def is_reduction(node: Node) -> bool:
    """Whether an expression is a call such as `x.mean()` or `torch.sum(x, 1)`."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in (MEAN, SUM)


class Losses:
    """Finds the kinds of numbers in a script, and the expressions that they are computed from."""

    def __init__(self, script: Script, flow: Flow) -> None:
        self.script = script
        self.flow = flow
        self._has_ignored = any(isinstance(n, cst.UnaryOperation) and script.code(n) == "-100" for n in script.nodes)
        self._defined = {name: found for each in script.assignments for name, found in self._definitions_of(each)}
        self._kinds: dict[Node, Kind] = {}
        self._depth = 0
        self._slices: dict[tuple[Node, bool, bool], tuple[set[Node], set[cst.FunctionDef | None]]] = {}
        self._batches: dict[Node, frozenset[Node | None]] = {}

    # ------------------------------------------------------------------ where a name was last assigned

    def _definitions_of(self, each: Assignment) -> Iterator[tuple[Node, Definition]]:
        """(name, its definition) for each name that an assignment binds; nothing for loops and for `x -= 1`."""
        elements = each.target.elements if isinstance(each.target, cst.Tuple | cst.List) else ()
        values = each.value.elements if isinstance(each.value, cst.Tuple) else ()
        for name in target_names(each.target) if not each.each and each.operator in ("=", "+=") else ():
            index = next((at for at, by in enumerate(elements) if self.script.is_inside(name, by)), None)
            if index is not None and index < len(values):
                yield name, Definition(values[index].value)
            else:
                yield name, Definition(each.value, adds=each.operator == "+=", index=index)

    def definitions(self, name: cst.Name) -> list[Definition]:
        """The definitions that a name may hold where it is used, the last first, without those by `for` loops."""
        script = self.script
        scope, place = script.scope(name.value, name), self._place(name)
        targets = [node for node in script.bound(name.value, name) if isinstance(node, cst.Name)]
        if script.function(name) is scope:
            targets = [node for node in targets if script.order(self._place(node)) < script.order(place)]
        found: list[Definition] = []
        for target in reversed(targets):
            definition = self._defined.get(target)
            if definition is None:
                loop = next((each for each in script.ancestors(target) if isinstance(each, cst.For)), None)
                if loop is not None and script.is_inside(target, loop.target) and script.is_inside(name, loop.body):
                    break
                continue
            found.append(definition)
            if not definition.adds and script.parent(script.statement(target)) in set(script.ancestors(name)):
                break
        return found

    def _place(self, node: Node) -> Node:
        small = (each for each in self.script.ancestors(node) if isinstance(each, cst.BaseSmallStatement))
        return next(small, self.script.statement(node))

    def given(self, name: cst.Name) -> list[Node | None] | None:
        """The arguments that calls pass for a parameter (None: its default); None if the name is no parameter."""
        scope = self.script.scope(name.value, name)
        if scope is None or not any(isinstance(by, cst.Param) for by in self.script.bound(name.value, name)):
            return None
        given = [self._given_to(scope, call).get(name.value) for call in self.flow.calls.get(scope, [])]
        return [each if each is None else each.value for each in given]

    def _given_to(self, function: cst.FunctionDef, call: cst.Call) -> dict[str, cst.Arg]:
        own = self.flow.own_functions[function]
        return arguments(call, own.parameters[own.is_bound :])

    # ------------------------------------------------------------------ what a number is made of

    def slice(self, node: Node, *, gradients: bool = False, forwards: bool = False) -> set[Node]:
        """The expressions that a number is computed from, also through names and functions of the script.

        Args:
            node: The number.
            gradients: Only the expressions that a gradient flows back through.
            forwards: Also the expressions in forward passes of the script's own modules.
        """
        return self._sliced(node, gradients, forwards)[0]

    def _sliced(self, node: Node, gradients: bool, forwards: bool) -> tuple[set[Node], set[cst.FunctionDef | None]]:
        """The slice, and the functions whose parameters stand for the arguments of all their calls."""
        key = (node, gradients, forwards)
        if key not in self._slices:
            seen: set[Node] = set()
            self._slices[key] = (seen, set())  # the result for a recursive call
            waiting = [node]
            # A parameter of the function around the expression may be the argument of any call of that function. For a
            # function that the expression calls, the arguments are parts of the expression.
            callers = {self.script.function(node)}
            while waiting:
                each = waiting.pop()
                if each in seen or (gradients and self._is_detached(each)):
                    continue
                seen.add(each)
                waiting += self.script.parts(each)
                if isinstance(each, cst.Call):
                    waiting += self.results(each, gradients=gradients, forwards=forwards)
                elif isinstance(each, cst.Name):
                    made = [found.value for found in self.definitions(each)]
                    made = [value for value in made if not (gradients and self._is_without_grad(value))]
                    loops = [] if gradients else [*map(self.script.parent, self.script.bound(each.value, each))]
                    waiting += [*made, *(loop.iter for loop in loops if isinstance(loop, cst.For | cst.CompFor))]
                    for value in self.given(each) or () if self.script.function(each) in callers else ():
                        if value is not None:
                            callers.add(self.script.function(value))
                            waiting.append(value)
            self._slices[key] = (seen, callers)
        return self._slices[key]

    def _is_detached(self, node: Node) -> bool:
        """Whether an expression has no gradient."""
        match node:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value="detach" | "item" | "numpy" | "tolist"))):
                return True
            case cst.Attribute(attr=cst.Name(value="data")):
                return True
        return False

    def _is_without_grad(self, node: Node) -> bool:
        is_copy = isinstance(node, cst.Call) and self.script.qualified(node.func) == "copy.deepcopy"
        return is_copy or any(
            isinstance(each, cst.With) and any("no_grad" in self.script.code(item.item) for item in each.items)
            for each in self.script.ancestors(node)
        )

    def called(self, call: cst.Call, *, forwards: bool = True) -> list[cst.FunctionDef]:
        """The functions of the script that a call may run; with `forwards`, also forward passes of its modules."""
        found = self.flow.functions(call)
        defined = [value.definition for value in self.flow.of(call.func, "object") if value.definition is not None]
        return [*found, *filter(None, map(forward_of, defined))] if forwards else found

    def results(self, call: cst.Call, *, gradients: bool = False, forwards: bool = False) -> list[Node]:
        """The expressions that the script's own functions may return to a call."""
        functions = self.called(call, forwards=forwards)
        if gradients:
            functions = [
                each for each in functions if not any("no_grad" in self.script.code(by) for by in each.decorators)
            ]
        return [value for each in functions for value in self.flow.own_functions[each].returns]

    def _returned(self, call: cst.Call, index: int | None) -> list[Node | None]:
        """The expressions that a call may return, or those at `index` of returned tuples; None for an unseen one."""
        found: list[Node | None] = []
        for value in self.results(call, forwards=True):
            if index is None:
                found.append(value)
            elif isinstance(value, cst.Tuple) and index < len(value.elements):
                found.append(value.elements[index].value)
            else:
                found.append(None)
        return found

    def models(self, loss: Node, trained: Values) -> Values:
        """The trained models that a loss's gradient flows through."""
        nodes = self.slice(loss, gradients=True)
        return frozenset(value for each in nodes for value in self.flow.of(each) if value in trained)

    # ------------------------------------------------------------------ the batches that a number depends on

    def varies(self, node: Node) -> bool:
        """Whether an expression depends on a rank's samples or on random numbers, and so differs between ranks."""
        return bool(self.batches(node))

    def batches(self, node: Node) -> frozenset[Node | None]:
        """The expressions that yield the batches that a node depends on; None among them stands for random numbers."""
        if node not in self._batches:
            nodes, callers = self._sliced(node, False, False)
            found: set[Node | None] = set()
            for each in nodes:
                own = self.script.function(each)
                sites = self.taken(each)
                is_any = own is None or own in callers
                found |= {site for site in sites if is_any or site is None or self.script.is_inside(site, own or site)}
            self._batches[node] = frozenset(found)
        return self._batches[node]

    def taken(self, node: Node) -> set[Node | None]:
        """The expressions that yield the batch that a node is or is part of; {None} if it draws random numbers."""
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
        """Whether a call draws random numbers repeatedly, as for samples: in a loop, a forward pass or a data set."""
        function = self.script.function(call)
        has_own = any(each.keyword is not None and each.keyword.value == "generator" for each in call.args)
        if has_own or not (self.script.qualified(call.func) or "").startswith(_NOISE):
            return False
        if self.script.loops(call) or function is None:
            return bool(self.script.loops(call))
        is_forward = self.flow.is_module_class(self.script.class_of(function)) and function.name.value != "__init__"
        calls = self.flow.calls.get(function, ())
        return is_forward or function.name.value == "__getitem__" or any(map(self.script.loops, calls))

    def is_size(self, node: Node) -> bool:
        """Whether an expression counts a batch's samples or elements, as `len(x)`, `x.shape[0]` or `x.numel()` do."""
        code, first = self.script.code, "0"
        match node:
            case cst.Call(func=cst.Name(value="len"), args=[cst.Arg(value=base), *_]):
                pass
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="size" | "numel" | "nelement"))):
                first = code(node.args[0].value) if node.args else "0"
            case cst.Call(args=[cst.Arg(value=base)]) if self.script.qualified(node.func) == "torch.numel":
                pass
            case (
                cst.Subscript(value=cst.Attribute(value=base, attr=cst.Name(value="shape")))
                | cst.Subscript(value=cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="size"))))
            ):
                first = code(node.slice[0])
            case cst.Name():
                found = self.definitions(node)
                return bool(found) and all(not each.adds and self.is_size(each.value) for each in found)
            case _:
                return False
        return first == "0" and self.flow.is_a(base, "batch")

    # ------------------------------------------------------------------ kinds

    def kind(self, node: Node) -> Kind:
        """The kind of a number. Unlike `metric`, it ignores whether samples are compared with each other."""
        if node not in self._kinds:
            self._kinds[node] = Kind(UNKNOWN)  # the result for a recursive call
            self._depth += 1
            if self._depth <= _DEPTH:
                self._kinds[node] = self._read(node)
            self._depth -= 1
        return self._kinds[node]

    def metric(self, node: Node) -> Kind:
        """The kind of a number, but UNKNOWN if samples are compared, or statistics of the batch go into it."""
        kind = self.kind(node)
        is_part = kind.name in (MEAN, SUM) and (self.compares_pairs(node) or bool(self.statistics(node)))
        return Kind(UNKNOWN) if is_part else kind

    def _read(self, node: Node) -> Kind:
        if not self.varies(node):
            return Kind(NOTHING if _ZERO.fullmatch(self.script.code(node)) else CONSTANT)
        if self.is_size(node):
            return Kind(SUM)
        match node:
            case cst.Name():
                return self._of_name(node)
            case cst.Attribute(value=inner, attr=cst.Name(value="data")) | cst.UnaryOperation(expression=inner):
                return self.kind(inner)
            case cst.Subscript(value=inner) if self.kind(inner).name in (MEAN, SUM):  # loss.data[0]
                return self.kind(inner)
            case cst.BinaryOperation():
                return self._of_operation(node)
            case cst.Call():
                return self._of_call(node)
            case cst.IfExp():
                return _alike([self.kind(node.body), self.kind(node.orelse)])
        return Kind(UNKNOWN)

    def _of_name(self, node: cst.Name) -> Kind:
        found = self.definitions(node)
        if not found:
            given = [] if self.flow.is_a(node, "batch") else self.given(node) or []
            return _alike([Kind(CONSTANT) if value is None else self.kind(value) for value in given])
        kinds = [
            self.kind(each.value)
            if each.index is None or not isinstance(each.value, cst.Call)
            else self._of_functions(each.value, each.index)
            for each in found
        ]
        result = kinds[0]
        for each, definition in zip(kinds[1:], found[1:], strict=True):
            was_added = definition.adds or found[0].adds
            result = combined(result, each) if was_added or each != result else result
        return result

    def _of_operation(self, node: cst.BinaryOperation) -> Kind:
        left, right = self.kind(node.left), self.kind(node.right)
        is_weight = self.batches(node.right) <= {None}  # depends on no samples: a constant or a random number
        match node.operator:
            case cst.Add() | cst.Subtract():
                return combined(left, right)
            case cst.Multiply() if is_weight or self.batches(node.left) <= {None}:
                return left if is_weight else right
            case cst.Multiply() if Kind(MEAN) in (left, right) and (
                self.is_size(node.left) or self.is_size(node.right)
            ):
                return Kind(SUM)
            case cst.Divide() if is_weight:
                return left
            case cst.Divide() if left.name == SUM:
                if self.is_size(node.right):
                    return Kind(MEAN)
                if self.kind(node.right).name == SUM and not self._is_of_model(node.right):
                    return Kind(MEAN, self.script.code(node.right))
        return Kind(UNKNOWN)

    def _is_of_model(self, node: Node) -> bool:
        """Whether a model's gradient flows through a divisor. Then it is no weight: weights have no gradient."""
        nodes = self.slice(node, gradients=True)
        return any(self.flow.is_module(value) for each in nodes for value in self.flow.of(each))

    def _of_call(self, node: cst.Call) -> Kind:
        func = node.func
        short = self.script.code(func).rsplit(".", 1)[-1]
        if self.criterion(node) is not None:
            return self._of_criterion(node)
        if is_reduction(node):
            return self._of_reduction(node)
        if isinstance(func, cst.Name) and short in ("float", "int", "round") and node.args:
            return self.kind(node.args[0].value)
        if isinstance(func, cst.Attribute) and short in _KEEPING:
            return self.kind(node.args[0].value if short == "scale" and node.args else func.value)
        return self._of_functions(node)

    def _of_reduction(self, node: cst.Call) -> Kind:
        """The kind of `x.mean()` or `torch.sum(x, 1)`: the innermost reduction over samples decides."""
        inner = self.kind(self._operand(node))
        if inner.name in (MEAN, SUM):
            return inner
        assert isinstance(node.func, cst.Attribute)
        return Kind(node.func.attr.value if self._is_over_samples(node) else UNKNOWN)

    def _operand(self, call: cst.Call) -> Node:
        """The object that a method is called on, or a function's first argument."""
        if isinstance(call.func, cst.Attribute) and self.script.qualified(call.func) is None:
            return call.func.value
        return call.args[0].value if call.args else call

    def _is_over_samples(self, call: cst.Call) -> bool:
        """Whether a reduction goes over samples: it is passed no dimension, or dimension 0."""
        short = self.script.code(call.func).rsplit(".", 1)[-1]
        names = [*_BEFORE_DIM.get(short, ()), "dim"]
        if self.script.qualified(call.func) is not None:
            names.insert(0, "input")
        given = arguments(call, names)
        dim = given.get("dim", given.get("axis"))
        dims = "0" if dim is None else self.script.code(dim.value)
        return (dim is not None or short not in _ALONG) and "0" in re.split(r"[\[\](), ]+", dims)

    def _of_functions(self, call: cst.Call, index: int | None = None) -> Kind:
        """The kind of the value that functions of the script return, or of the value at `index` of a returned tuple."""
        functions = self.called(call)
        kinds = [Kind(UNKNOWN) if value is None else self.kind(value) for value in self._returned(call, index)]
        return self._said_outside(_alike(kinds), functions[0], call) if functions else Kind(UNKNOWN)

    def _said_outside(self, kind: Kind, function: cst.FunctionDef, call: cst.Call) -> Kind:
        """A kind whose weight is in the caller's expressions; UNKNOWN if it needs names local to the function."""
        if kind.weight is None:
            return kind
        given = self._given_to(function, call)
        said = {name: ast.parse(self.script.code(each.value), mode="eval").body for name, each in given.items()}
        expression = ast.parse(kind.weight, mode="eval")
        own = {each.id for each in ast.walk(expression) if isinstance(each, ast.Name)} - said.keys()
        if own & self.script.bindings.get(function, {}).keys():
            return Kind(UNKNOWN)
        return Kind(kind.name, ast.unparse(_Renaming(said).visit(expression)))

    # ------------------------------------------------------------------ torch's losses

    def criterion(self, call: cst.Call) -> tuple[str, Sequence[cst.Arg], str | None] | None:
        """For a call of one of torch's losses: its name, the arguments that configure it, and the code of its module.

        The module is None for a function. The result is None for other calls.
        """
        name = self.script.qualified(call.func) or ""
        short = name.rsplit(".", 1)[-1]
        if name.startswith("torch.") and (short in _FUNCTIONAL or short.endswith("_loss")):
            return short, call.args, None
        for value in self.flow.of(call.func, "object"):
            made = self.script.qualified(value.site.func) or "" if isinstance(value.site, cst.Call) else ""
            if value.definition is None and made.startswith("torch.nn.") and made.endswith("Loss"):
                return made.rsplit(".", 1)[-1], value.site.args, self.script.code(call.func)  # type: ignore[attr-defined]
        return None

    def _is_entropy(self, call: cst.Call) -> bool:
        return (self.criterion(call) or ("",))[0] in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")

    def _of_criterion(self, call: cst.Call) -> Kind:
        code = self.script.code
        _, settings, holder = self.criterion(call) or ("", (), None)
        given = {each.keyword.value: each.value for each in settings if each.keyword is not None}
        words = {code(given[key]).strip("'\"") for key in ("reduction", "size_average") if key in given}
        if words & {"sum", "False"}:
            return Kind(SUM)
        if not words <= {"mean", "batchmean", "True"} or "reduce" in given:
            return Kind(UNKNOWN)
        if not self._is_entropy(call) or len(call.args) < 2:
            return Kind(MEAN)
        target, text = call.args[1].value, code(call.args[1].value)
        unnamed = [each.value for each in settings if each.keyword is None][2 if holder is None else 0 :]
        weights = given.get("weight") or next(iter(unnamed), None)
        if weights is not None:
            said = code(weights) if holder is None else f"{holder}.weight"
            return Kind(UNKNOWN) if "ignore_index" in given else Kind(MEAN, f"{said}[{text}].sum()")
        # Flattened targets are those of tokens or pixels, and some may be ignored.
        is_row = isinstance(target, cst.Call) and text.endswith(("view(-1)", "reshape(-1)", "flatten()"))
        if "ignore_index" in given or is_row or self._has_ignored:
            ignored = code(given["ignore_index"]) if "ignore_index" in given else "-100"
            return Kind(MEAN, f"({text} != {ignored}).sum()")
        return Kind(MEAN)

    # ------------------------------------------------------------------ losses that differ on a part of a batch

    def compares_pairs(self, loss: Node) -> bool:
        """Whether samples of a batch are compared with each other: `cdist(z, z)`, `z @ z.T`, targets 0, 1, 2, ..."""
        nodes = self.slice(loss, forwards=True)
        return any(self._compares(node) or self._counts_up(node) for node in nodes)

    def _counts_up(self, node: Node) -> bool:
        """Whether a node is a criterion whose targets are indices of samples in the batch: `torch.arange(n)`."""
        if not isinstance(node, cst.Call) or not self._is_entropy(node) or len(node.args) < 2:
            return False
        made = [each.func for each in self.slice(node.args[1].value, gradients=True) if isinstance(each, cst.Call)]
        return any(self.script.qualified(each) == "torch.arange" for each in made)

    def _compares(self, node: Node) -> bool:
        qualified = self.script.qualified(node.func) or "" if isinstance(node, cst.Call) else ""
        operands: list[Node] = []
        match node:
            case cst.Call(func=cst.Attribute(value=base), args=[other, *_]) if not qualified:
                operands = [base, other.value]
            case cst.Call(args=[first, *others]):
                operands = [first.value, *(each.value for each in others[:1])]
            case cst.BinaryOperation(left=left, right=right):
                operands = [left, right]
        if not operands or not all(self.batches(each) - {None} for each in operands):
            return False
        texts = [self.script.code(each) for each in operands]
        is_product = isinstance(node, cst.Call) or isinstance(node.operator, cst.MatrixMultiply)  # type: ignore[attr-defined]
        has_axes = any(_IN_FRONT.search(each) for each in texts) and any(_BEHIND.search(each) for each in texts)
        return qualified.endswith(("pdist", "cdist")) or (is_product and texts[-1].endswith((".T", ".t()"))) or has_axes

    def statistics(self, loss: Node) -> list[cst.Call]:
        """The statistics over all samples, such as `x.std()`, that a loss uses: each rank computes another one."""
        nodes = self.slice(loss, forwards=True)
        calls = [each for each in nodes if isinstance(each, cst.Call)]
        found = [each for each in calls if self._is_statistic(each)]
        takers = [each for each in calls if self.criterion(each) is not None or is_reduction(each)] if found else []
        return sorted({each for each in found for by in takers if self._takes(by, each)}, key=self.script.order)

    def _is_statistic(self, call: cst.Call) -> bool:
        short = self.script.code(call.func).rsplit(".", 1)[-1]
        is_one = short in _STATISTICS | _ALONG and not (short in ("max", "min") and len(call.args) > 1)
        return is_one and self._is_over_samples(call) and bool(self.batches(self._operand(call)) - {None})

    def _takes(self, call: cst.Call, statistic: cst.Call) -> bool:
        """Whether an operand of a criterion or reduction was computed from a statistic."""
        if self.script.is_inside(call, statistic):
            return False
        if self.criterion(call) is not None:
            return any(statistic in self.slice(each.value, forwards=True) for each in call.args)
        operand = self._operand(call)  # the mean of a single number is no mean of samples
        is_one = self.kind(operand).name in (MEAN, SUM) or not self._is_over_samples(call)
        return not is_one and statistic in self.slice(operand, forwards=True)


def forward_of(definition: cst.ClassDef) -> cst.FunctionDef | None:
    """The `forward` method that a class defines itself, or None."""
    for node in definition.body.body:
        if isinstance(node, cst.FunctionDef) and node.name.value == "forward":
            return node
    return None


class _Renaming(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, said: dict[str, ast.expr]) -> None:
        self._said = said

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._said.get(node.id, node)
