"""What a number in a training script is: a mean over the batch's samples, a sum over them, or neither.

A gradient and a printed loss are right on several ranks only if ranks are weighted by what the number was averaged
over. That is read from how the number is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from evenstep.convert.source import Node, Script
from evenstep.convert.values import Flow, Value, Values, arguments

MEAN, SUM, CONSTANT, UNKNOWN, PAIRS = "mean", "sum", "constant", "unknown", "pairs"
_DEPTH = 12  # of names and functions that are followed
# What stands between an expression and those within it.
_INNER = cst.Arg | cst.BaseElement | cst.BaseSlice | cst.SubscriptElement | cst.CompFor | cst.CompIf
# Functions of torch.nn.functional and classes of torch.nn whose result is a mean unless `reduction` says otherwise.
_FUNCTIONAL = {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_FUNCTIONAL |= {"binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "hinge_embedding_loss"}
_FUNCTIONAL |= {"cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "poisson_nll_loss", "ctc_loss"}
_FUNCTIONAL |= {"multi_margin_loss", "soft_margin_loss", "multilabel_soft_margin_loss", "gaussian_nll_loss"}
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
        name: MEAN, SUM, CONSTANT (the same on all ranks), PAIRS (each sample is compared with all), UNKNOWN.
        weight: What a mean was averaged over, as an expression, where it isn't the batch's samples.
    """

    name: str
    weight: str | None = None


def combined(left: Kind, right: Kind) -> Kind:
    """Of a sum of two terms."""
    if left.name == CONSTANT:
        return right
    if right.name == CONSTANT or left == right:
        return left
    for name in (PAIRS, UNKNOWN):
        if name in (left.name, right.name):
            return Kind(name)
    # Means over different numbers can't be weighted by one of them; sums and means can't be added over ranks alike.
    return Kind(UNKNOWN)


class Losses:
    """Reads expressions of a script."""

    def __init__(self, script: Script, flow: Flow) -> None:
        self.script = script
        self.flow = flow
        self._kinds: dict[Node, Kind] = {}

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
        match node:
            case cst.Integer() | cst.Float() | cst.SimpleString():
                return Kind(CONSTANT)
            case cst.Name():
                return self._of_name(node, depth)
            case cst.Attribute():
                if node.attr.value == "loss" and isinstance(node.value, cst.Name):
                    return Kind(UNKNOWN)
                return self.kind(node.value, depth + 1) if node.attr.value == "data" else Kind(CONSTANT)
            case cst.UnaryOperation():
                return self.kind(node.expression, depth + 1)
            case cst.BinaryOperation():
                return self._of_operation(node, depth)
            case cst.Call():
                return self._of_call(node, depth)
            case cst.IfExp():
                return combined(self.kind(node.body, depth + 1), self.kind(node.orelse, depth + 1))
            case cst.Subscript():
                if self.is_size(node):
                    return Kind(SUM)
                return Kind(UNKNOWN)
        return Kind(UNKNOWN)

    def _is_read(self, node: Node) -> bool:
        """Whether an expression is a number for people, not one whose gradient is taken: `loss.item()`."""
        if not isinstance(node, cst.Call):
            return False
        is_item = isinstance(node.func, cst.Attribute) and node.func.attr.value == "item"
        return is_item or self.script.code(node.func) == "float"

    def is_size(self, node: Node) -> bool:
        """Whether an expression is the number of samples of a batch: `len(x)`, `x.size(0)`, `x.shape[0]`."""
        match node:
            case cst.Call(func=cst.Name(value="len")) if node.args:
                return self.flow.is_a(node.args[0].value, "batch")
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="size" | "numel" | "nelement"))):
                return self.flow.is_a(base, "batch")
            case cst.Call() if self.script.qualified(node.func) == "torch.numel" and node.args:
                return self.flow.is_a(node.args[0].value, "batch")
            case cst.Subscript(value=cst.Attribute(value=base, attr=cst.Name(value="shape"))):
                return self.flow.is_a(base, "batch")
            case cst.Name():
                found = self.reaching(node)
                return bool(found) and all(not adds and self.is_size(value) for value, adds in found)
        return False

    def _of_name(self, node: cst.Name, depth: int) -> Kind:
        if self.is_size(node):
            return Kind(SUM)
        found = self.reaching(node)
        if not found:
            scope = self.script.scope(node.value, node)
            if any(isinstance(by, cst.Param) for by in self.script.bindings.get(scope, {}).get(node.value, [])):
                return self._of_parameter(node, scope, depth)
            return Kind(UNKNOWN if self.flow.is_a(node, "batch") else CONSTANT)
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

    def _of_parameter(self, node: cst.Name, scope: cst.FunctionDef | None, depth: int) -> Kind:
        if scope is None or self.flow.is_a(node, "batch"):
            return Kind(UNKNOWN)
        names = [each.name.value for each in scope.params.params]
        if self.script.class_of(scope) is not None:
            names = names[1:]
        kinds = []
        for call in self.flow.calls.get(scope, []):
            given = arguments(call, names).get(node.value)
            kinds.append(Kind(CONSTANT) if given is None else self.kind(given.value, depth + 1))
        if not kinds:
            return Kind(UNKNOWN)
        return kinds[0] if all(each == kinds[0] for each in kinds) else Kind(UNKNOWN)

    def _of_operation(self, node: cst.BinaryOperation, depth: int) -> Kind:
        left, right = self.kind(node.left, depth + 1), self.kind(node.right, depth + 1)
        match node.operator:
            case cst.Add() | cst.Subtract():
                return combined(left, right)
            case cst.Multiply():
                if left.name == CONSTANT or right.name == CONSTANT:
                    return right if left.name == CONSTANT else left
                if {left.name, right.name} == {MEAN, SUM} and (self.is_size(node.left) or self.is_size(node.right)):
                    return Kind(SUM)
                # A number that the script weights by the batch's size is one of a sample in the mean, however it came.
                if (self.is_size(node.right) and self._is_read(node.left)) or (
                    self.is_size(node.left) and self._is_read(node.right)
                ):
                    return Kind(SUM)
            case cst.Divide():
                if right.name == CONSTANT:
                    return left
                if left.name == SUM and self.is_size(node.right):
                    return Kind(MEAN)
                if left.name == SUM and right.name == SUM:
                    return Kind(UNKNOWN)
            case cst.MatrixMultiply():
                return Kind(UNKNOWN)
        return Kind(UNKNOWN)

    def _of_call(self, node: cst.Call, depth: int) -> Kind:
        script, func = self.script, node.func
        if self.is_size(node):
            return Kind(SUM)
        name = script.qualified(func) or ""
        short = script.code(func).rsplit(".", 1)[-1]
        mentions_parameters = any(
            isinstance(each, cst.Attribute) and each.attr.value in ("parameters", "named_parameters")
            for each in script.inside(node)
        )
        if mentions_parameters:
            return Kind(CONSTANT)
        if short in _FUNCTIONAL and ("functional" in name or name.startswith("torch.")):
            return self._of_criterion(node, node.args, short)
        if short in ("mean", "sum") and (name.startswith("torch.") or isinstance(func, cst.Attribute)):
            return Kind(MEAN if short == "mean" else SUM)
        if short in ("float", "int") and isinstance(func, cst.Name) and node.args:
            return self.kind(node.args[0].value, depth + 1)
        if isinstance(func, cst.Attribute) and short in _KEEPING:
            is_scaling = short == "scale" and node.args
            return self.kind(node.args[0].value if is_scaling else func.value, depth + 1)
        if name in ("torch.log", "torch.exp", "torch.sqrt", "math.exp", "math.log"):
            return Kind(UNKNOWN)
        for value in self.flow.of(func):
            if value.kind == "object":
                return self._of_criterion_object(node, value.site, value.definition, depth)
            if value.kind == "function" and isinstance(value.site, cst.FunctionDef):
                return self._of_function(value.site, node, depth)
        if isinstance(func, cst.Name) and func.value == "sum" and node.args:  # python's, over a few terms
            return Kind(UNKNOWN)
        return Kind(UNKNOWN)

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
        if not kinds or any(each != kinds[0] for each in kinds):
            return Kind(UNKNOWN)
        return self._said_outside(kinds[0], function, call)

    def _said_outside(self, kind: Kind, function: cst.FunctionDef, call: cst.Call) -> Kind:
        """A weight in the caller's words; UNKNOWN if it hangs on what only the function has."""
        if kind.weight is None:
            return kind
        names = [each.name.value for each in (*function.params.posonly_params, *function.params.params)]
        given = arguments(call, names[1:] if self.script.class_of(function) is not None else names)
        replacements: dict[str, cst.BaseExpression] = {}
        expression = cst.parse_expression(kind.weight, self.script.module.config_for_parsing)
        collector = _Names()
        expression.visit(collector)
        for name in collector.found:
            if name in given:
                replacements[name] = given[name].value
            elif name in self.script.bindings.get(function, {}):
                return Kind(UNKNOWN)
        said = expression.visit(_Renaming(replacements))
        assert isinstance(said, cst.BaseExpression)
        return Kind(kind.name, self.script.module.code_for_node(said))

    def _of_part(self, call: cst.Call, index: int, depth: int) -> Kind:
        """One of several values that a function of the script, or a module's forward pass, returns."""
        for value in self.flow.of(call.func):
            function: Node | None = value.site if value.kind == "function" else None
            if value.kind == "object" and value.definition is not None:
                function = _forward(value.definition)
            if isinstance(function, cst.FunctionDef):
                return self._of_function(function, call, depth, index)
        return Kind(UNKNOWN)

    def _of_criterion_object(self, call: cst.Call, site: Node, definition: cst.ClassDef | None, depth: int) -> Kind:
        if definition is not None:
            forward = _forward(definition)
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
        reduction = given.get("reduction")
        if reduction is not None:
            text = self.script.code(reduction).strip("'\"")
            if text == "sum":
                return Kind(SUM)
            if text not in ("mean", "batchmean"):
                return Kind(UNKNOWN)
        if len(call.args) < 2:
            return Kind(MEAN)
        target = call.args[1].value
        if name in ("cross_entropy", "CrossEntropyLoss") and self._counts_the_batch(target):
            return Kind(PAIRS)
        if name in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"):
            text = self.script.code(target)
            if "weight" in given or (holder is None and len(call.args) > 2 and call.args[2].keyword is None):
                weights = f"{holder}.weight" if holder is not None else None
                if holder is None:
                    found = given.get("weight") or call.args[2].value
                    weights = self.script.code(found)
                return Kind(MEAN, f"{weights}[{text}].sum()")
            if "ignore_index" in given:
                ignored = self.script.code(given["ignore_index"])
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

    # ------------------------------------------------------------------ models

    def models(self, node: Node, trained: Values) -> Values:
        """The trained models that a loss goes through, as far as its gradient flows."""
        found: set[Value] = set()
        seen: set[Node] = set()
        waiting: list[Node] = [node]
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            match each:
                case cst.Call(func=cst.Attribute(attr=cst.Name(value="detach" | "item" | "numpy" | "tolist"))):
                    continue
                case cst.Call():
                    found |= self._called(each, trained)
                    waiting += self._results(each, trained)
                    waiting += [argument.value for argument in each.args]
                    if isinstance(each.func, cst.Attribute):
                        waiting.append(each.func.value)
                case cst.Attribute():
                    found |= self.flow.of(each) & trained
                    waiting.append(each.value)
                case cst.Name():
                    found |= self.flow.of(each) & trained
                    if not self.flow.of(each) & trained:
                        waiting += [value for value, _ in self.reaching(each) if not self._is_without_grad(value)]
                case _:
                    waiting += [child for child in each.children if isinstance(child, cst.BaseExpression | _INNER)]
        return frozenset(found)

    def _called(self, call: cst.Call, trained: Values) -> Values:
        found = self.flow.of(call.func) & trained
        if isinstance(call.func, cst.Attribute):
            found |= self.flow.of(call.func.value) & trained
        return found

    def _results(self, call: cst.Call, trained: Values) -> list[Node]:
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
        return any(
            isinstance(each, cst.With) and any("no_grad" in self.script.code(item.item) for item in each.items)
            for each in self.script.ancestors(node)
        )

    def _has_no_grad(self, function: cst.FunctionDef) -> bool:
        return any("no_grad" in self.script.code(each.decorator) for each in function.decorators)


def _forward(definition: cst.ClassDef) -> cst.FunctionDef | None:
    for node in definition.body.body:
        if isinstance(node, cst.FunctionDef) and node.name.value == "forward":
            return node
    return None


class _Names(cst.CSTVisitor):
    """The names of an expression, without those of attributes and keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)


class _Renaming(cst.CSTTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, replacements: dict[str, cst.BaseExpression]) -> None:
        super().__init__()
        self._replacements = replacements

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        found = self._replacements.get(original_node.value)
        if found is None:
            return updated_node
        if isinstance(found, cst.Name | cst.Attribute | cst.Call | cst.Subscript):
            return found
        return found.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
