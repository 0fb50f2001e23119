"""A script as LibCST reads it: nodes with parents, lines and functions, and what its names are imported as."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

Node = cst.CSTNode
Statement = cst.SimpleStatementLine | cst.SimpleStatementSuite | cst.BaseCompoundStatement
# What `from module import *` brings, as far as it matters here.
_STARRED = {"torch.utils.data": ("DataLoader", "TensorDataset", "IterableDataset"), "tqdm": ("tqdm", "trange")}
_FUNCTIONS = (cst.FunctionDef, cst.Lambda)


class Script:
    """A parsed script. Nodes compare by identity; `nodes` has them in the order of the text.

    Attributes:
        module: The tree.
        nodes: All nodes but whitespace.
        has_stars: Names may come from a module, all of whose names are imported.
        bindings: By function (None: the module), what each name is bound by: the target's node, in order.
    """

    def __init__(self, module: cst.Module) -> None:
        wrapper = MetadataWrapper(module)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents: dict[Node, Node] = {}
        self._order: dict[Node, int] = {}
        self._code: dict[Node, str] = {}
        self.nodes: list[Node] = []
        self.has_stars = False
        waiting: list[Node] = [self.module]
        while waiting:
            node = waiting.pop()
            self._order[node] = len(self.nodes)
            self.nodes.append(node)
            children = [child for child in node.children if not isinstance(child, cst.BaseParenthesizableWhitespace)]
            for child in children:
                self._parents[child] = node
            waiting += reversed(children)
        self.imports = self._read_imports()
        self.bindings = self._read_bindings()

    # ------------------------------------------------------------------ places

    def parent(self, node: Node) -> Node | None:
        """The node around this one; None of the module."""
        return self._parents.get(node)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """From the parent to the module."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def order(self, node: Node) -> int:
        """Where a node begins, counted in nodes."""
        return self._order[node]

    def line(self, node: Node) -> int:
        """The line on which a node begins, from 1."""
        return int(self._positions[node].start.line) if node in self._positions else 0

    def code(self, node: Node) -> str:
        """The text of a node."""
        if node not in self._code:
            self._code[node] = self.module.code_for_node(node).strip()
        return self._code[node]

    def function(self, node: Node) -> cst.FunctionDef | None:
        """The function whose body a node is in; None at module level."""
        return next((each for each in self.ancestors(node) if isinstance(each, cst.FunctionDef)), None)

    def class_of(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        """The class of a method."""
        for each in self.ancestors(function):
            if isinstance(each, cst.ClassDef | cst.FunctionDef):
                return each if isinstance(each, cst.ClassDef) else None
        return None

    def statement(self, node: Node) -> Statement:
        """The statement that a node is in: a line, a one-line body, or a compound statement whose head it is in."""
        if isinstance(node, Statement):
            return node
        return next(each for each in self.ancestors(node) if isinstance(each, Statement))

    def loops(self, node: Node) -> list[cst.For | cst.While]:
        """The loops of the same function around a node, innermost first."""
        found: list[cst.For | cst.While] = []
        below = node
        for each in self.ancestors(node):
            if isinstance(each, cst.FunctionDef):
                break
            if isinstance(each, cst.For | cst.While) and below is not getattr(each, "iter", None):
                found.append(each)
            below = each
        return found

    def inside(self, node: Node) -> list[Node]:
        """A node and all within it, in order."""
        first = self._order[node]
        last = first + 1
        for position in range(first + 1, len(self.nodes)):
            above = self._parents[self.nodes[position]]
            if self._order[above] < first:
                break
            last = position + 1
        return self.nodes[first:last]

    def parts(self, node: Node) -> list[cst.BaseExpression]:
        """The outermost expressions within one, as far as they are read."""
        found: list[cst.BaseExpression] = []
        waiting = list(node.children)
        while waiting:
            each = waiting.pop(0)
            if not isinstance(each, cst.BaseExpression):
                waiting = [*each.children, *waiting]
            elif not isinstance(each, cst.Name) or self.is_read(each):
                found.append(each)
        return found

    def is_inside(self, node: Node, around: Node) -> bool:
        """Whether a node is another, or within it."""
        return node is around or any(each is around for each in self.ancestors(node))

    # ------------------------------------------------------------------ names

    def qualified(self, node: Node) -> str | None:
        """The full name of something imported, "torch.optim.Adam" for `optim.Adam`; None of what isn't."""
        if isinstance(node, cst.Name):
            return None if self._is_rebound(node) else self.imports.get(node.value)
        if isinstance(node, cst.Attribute):
            base = self.qualified(node.value)
            return None if base is None else f"{base}.{node.attr.value}"
        return None

    def names(self) -> set[str]:
        """Every name of the text."""
        return {node.value for node in self.nodes if isinstance(node, cst.Name)}

    def scope(self, name: str, at: Node) -> cst.FunctionDef | None:
        """The function that a name used at some place belongs to; None: the module."""
        function = self.function(at)
        while function is not None:
            if name in self.bindings.get(function, {}):
                return function
            function = self.function(function)
        return None

    def bound(self, name: str, at: Node) -> list[Node]:
        """What binds a name that is used at some place: targets, parameters, functions and classes."""
        return self.bindings.get(self.scope(name, at), {}).get(name, [])

    def is_read(self, node: Node) -> bool:
        """Whether an expression stands for what it holds: it is no attribute's, keyword's or lambda's own name."""
        parent = self.parent(node)
        if (isinstance(parent, cst.Arg) and parent.keyword is node) or (
            isinstance(parent, cst.Attribute) and parent.attr is node
        ):
            return False
        lambdas = [each for each in self.ancestors(node) if isinstance(each, cst.Lambda)]
        own = {each.name.value for function in lambdas for each in function.params.params}
        return not isinstance(node, cst.Name) or node.value not in own

    def _is_rebound(self, node: cst.Name) -> bool:
        function = self.function(node)
        while function is not None:
            if node.value in self.bindings.get(function, {}) if hasattr(self, "bindings") else False:
                return True
            function = self.function(function)
        return False

    def _read_imports(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, cst.Import):
                for alias in node.names:
                    full = self.code(alias.name)
                    if alias.asname is not None:
                        found[self.code(alias.asname.name)] = full
                    else:
                        found[full.split(".")[0]] = full.split(".")[0]
            elif isinstance(node, cst.ImportFrom) and node.module is not None:
                full = "." * len(node.relative) + self.code(node.module)
                if isinstance(node.names, cst.ImportStar):
                    self.has_stars = True
                    found |= {name: f"{full}.{name}" for name in _STARRED.get(full, ())}
                    continue
                for alias in node.names:
                    name = self.code(alias.asname.name) if alias.asname is not None else self.code(alias.name)
                    found[name] = f"{full}.{self.code(alias.name)}"
        return found

    def _read_bindings(self) -> dict[cst.FunctionDef | None, dict[str, list[Node]]]:
        found: dict[cst.FunctionDef | None, dict[str, list[Node]]] = {}
        elsewhere = {
            (self.function(node), item.name.value)
            for node in self.nodes
            if isinstance(node, cst.Global)
            for item in node.names
        }

        def bind(name: str, function: cst.FunctionDef | None, by: Node) -> None:
            if (function, name) in elsewhere:
                function = None
            found.setdefault(function, {}).setdefault(name, []).append(by)

        for node in self.nodes:
            function = self.function(node)
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                if not isinstance(self.parent(self.parent(node) or node), cst.ClassDef):
                    bind(node.name.value, function, node)
            elif isinstance(node, cst.Param):
                above = next(each for each in self.ancestors(node) if isinstance(each, _FUNCTIONS))
                if isinstance(above, cst.FunctionDef):
                    bind(node.name.value, above, node)
            else:
                for target in _targets(node):
                    for name in _target_names(target):
                        bind(name.value, function, name)
        return found


def _targets(node: Node) -> list[Node]:
    match node:
        case cst.AssignTarget() | cst.AnnAssign() | cst.AugAssign() | cst.For() | cst.CompFor() | cst.NamedExpr():
            return [node.target]
        case cst.WithItem() if node.asname is not None:
            return [node.asname.name]
    return []


def _target_names(target: Node) -> list[cst.Name]:
    match target:
        case cst.Name():
            return [target]
        case cst.Tuple() | cst.List():
            return [name for element in target.elements for name in _target_names(element.value)]
        case cst.StarredElement():
            return _target_names(target.value)
    return []


target_names = _target_names
