"""One file as LibCST parses it: nodes in the order of the text, their frames, and what binds names.

A *frame* is what encloses a node: a function, a class, a loop, a branch of an `if`, a `with`. After
`if rank != 0: return` the rest of the block is in the other branch of that `if`. One walk finds the frames of all
nodes. The calls, assignments, loops and functions that rules examine are records, made from the nodes on first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import libcst as cst
from libcst._nodes.internal import CodegenState

from evenstep.tools.reading.source import Source

Node = cst.CSTNode
Statement = cst.SimpleStatementLine | cst.SimpleStatementSuite | cst.BaseCompoundStatement

_EMPTY = cst.Module([])
# The names that `from module import *` brings, as far as they matter here.
_STARRED = {"torch.utils.data": ("DataLoader", "TensorDataset", "IterableDataset"), "tqdm": ("tqdm", "trange")}
# The parts of nodes whose fields LibCST declares in another order than that of the text. Imports are read whole.
_PARTS: dict[type[Node], tuple[str, ...]] = {
    cst.FunctionDef: ("decorators", "name", "params", "returns", "body"),
    cst.ClassDef: ("decorators", "name", "bases", "keywords", "body"),
    cst.Parameters: ("posonly_params", "params", "star_arg", "kwonly_params", "star_kwarg"),
    cst.IfExp: ("body", "test", "orelse"),
    cst.Arg: ("keyword", "value"),
    cst.ExceptHandler: ("type", "name", "body"),
    cst.ExceptStarHandler: ("type", "name", "body"),
    cst.MatchCase: ("pattern", "guard", "body"),
    cst.Import: (),
    cst.ImportFrom: (),
}
_ASSIGNING = {cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.With, cst.For, cst.CompFor}
_ELSEWHERE = {cst.Global, cst.Nonlocal}
_WITH_FRAMES = {cst.If, cst.IfExp, cst.BooleanOperation, cst.For, cst.While, cst.With, cst.Try, cst.TryStar, cst.Lambda}
_WITH_FRAMES |= {cst.ListComp, cst.GeneratorExp, cst.SetComp, cst.DictComp, cst.CompFor}
_WITH_FRAMES |= {cst.Param, cst.FunctionDef, cst.ClassDef}
_NO_PARTS = {"lpar", "rpar", "comma", "semicolon", "equal", "operator", "dot", "header", "footer", "leading_lines"}
_NO_PARTS |= {"lines_after_decorators", "lbracket", "rbracket", "lbrace", "rbrace", "indent"}
_NO_PARTS |= {"first_colon", "second_colon", "asynchronous", "star", "colon", "separator"}


@functools.lru_cache(1 << 16)
def text_of(node: Node | None) -> str:
    """The source text of a node; "" for None."""
    return "" if node is None else str(_EMPTY.code_for_node(node)).strip()


def dotted(node: Node | None) -> str:
    """The dotted name of a name or attribute, `a.b.c`. `a[0]` counts as `a`. "" for any other expression."""
    match node:
        case cst.Name():
            return str(node.value)
        case cst.Attribute():
            before = dotted(node.value)
            return f"{before}.{node.attr.value}" if before else ""
        case cst.Subscript():
            return dotted(node.value)
    return ""


def shortened(text: str, length: int = 100) -> str:
    """A text on one line, cut in its middle if it is long."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 20]} ... {text[-15:]}"


def leaves(suite: Node) -> bool:
    """Whether a block ends with `return`, `raise`, `continue`, `break` or `sys.exit()`."""
    body = getattr(suite, "body", ())
    if not body:
        return False
    last = body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
        return dotted(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, cst.Return | cst.Raise | cst.Continue | cst.Break)


def target_names(target: Node) -> list[cst.Name]:
    """The names that a target binds, alone or in a tuple."""
    match target:
        case cst.Name():
            return [target]
        case cst.Tuple() | cst.List():
            return [name for element in target.elements for name in target_names(element.value)]
        case cst.StarredElement():
            return target_names(target.value)
    return []


@dataclass(eq=False)
class Frame:
    """What encloses a node. Frames are linked from the innermost outwards.

    Attributes:
        kind: "module", "class", "function", "lambda", "loop", "if", "with", "try" or "except".
        parent: The next frame outwards.
        function: The function that the frame belongs to; None at the top level.
        node: The statement or expression that makes the frame.
        test: The condition of an `if` or `while`.
        holds: True in the branch of an `if` where the condition holds.
    """

    kind: str
    parent: Frame | None
    file: File
    function: Function | None = None
    node: Node | None = None
    test: Node | None = None
    holds: bool = True

    @functools.cached_property
    def line(self) -> int:
        """The line of an `if`, counted from 1; 0 for other statements."""
        return self.file.line(self.node) if isinstance(self.node, cst.If) else 0

    def outwards(self) -> Iterator[Frame]:
        """This frame and those around it, up to that of its function or module."""
        frame: Frame | None = self
        while frame is not None and frame.function is self.function:
            yield frame
            frame = frame.parent


@dataclass(eq=False)
class Call:
    """One call. `name` has import aliases resolved, as in "torch.nn.parallel.DistributedDataParallel"."""

    node: cst.Call
    frame: Frame

    @functools.cached_property
    def name(self) -> str:
        """The dotted name of the called function, with import aliases resolved; "" if it has none."""
        return self.frame.file.full_name(self.node.func)

    @functools.cached_property
    def last(self) -> str:
        """The last name of the called expression, "step" for `make().step()`; "" if it ends with no name."""
        if self.name:
            return self.name.rpartition(".")[2]
        return str(self.node.func.attr.value) if isinstance(self.node.func, cst.Attribute) else ""

    @functools.cached_property
    def line(self) -> int:
        """The line on which the call begins, from 1."""
        return self.frame.file.line(self.node)

    @property
    def column(self) -> int:
        """The column in which the call begins, from 1."""
        return self.frame.file.column(self.node)

    @property
    def receiver(self) -> Node | None:
        """The expression before the last dot of the called function: the object of a method call."""
        return self.node.func.value if isinstance(self.node.func, cst.Attribute) else None

    @property
    def text(self) -> str:
        """The source text of the call, on one line, shortened."""
        return shortened(text_of(self.node))

    def positional(self, index: int) -> Node | None:
        """The value of a positional argument; None if there are fewer."""
        plain = [each for each in self.node.args if each.keyword is None and not each.star]
        return plain[index].value if index < len(plain) else None

    def argument(self, keyword: str, index: int | None = None) -> Node | None:
        """The value of a keyword argument, or else of the positional one at `index`; None if neither is passed."""
        for each in self.node.args:
            if each.keyword is not None and each.keyword.value == keyword:
                return each.value
        return None if index is None else self.positional(index)

    @property
    def arguments(self) -> list[Node]:
        """The values of all arguments."""
        return [each.value for each in self.node.args]

    @property
    def has_star(self) -> bool:
        """Whether the call passes `*args` or `**kwargs`, whose values can't be read."""
        return any(each.star for each in self.node.args)


@dataclass(eq=False)
class Assignment:
    """`target = value`, `with value as target`, or `for target in value` (then `each` is true)."""

    target: Node
    value: Node
    frame: Frame
    statement: Node
    operator: str = "="

    @functools.cached_property
    def line(self) -> int:
        """The line on which the statement begins, from 1."""
        return self.frame.file.line(self.statement)

    @property
    def each(self) -> bool:
        """Whether the assignment is a loop's, which assigns the elements of `value` one by one."""
        return isinstance(self.statement, cst.For | cst.CompFor)


@dataclass(eq=False)
class Loop:
    """A `for` or `while` loop, or the `for` of a comprehension. `frame` is the frame of its body."""

    node: cst.For | cst.While | cst.CompFor
    frame: Frame

    @functools.cached_property
    def line(self) -> int:
        """The line on which the loop or its comprehension begins, from 1."""
        return self.frame.file.line(self.frame.node or self.node)

    @property
    def iterates(self) -> Node | None:
        """The iterated expression; None for a `while`."""
        return None if isinstance(self.node, cst.While) else self.node.iter


@dataclass(eq=False)
class Class:
    """A class of the script; `methods` are those of its own body, by name."""

    node: cst.ClassDef
    file: File

    def __post_init__(self) -> None:
        self.name = str(self.node.name.value)
        self.methods: dict[str, Function] = {}


@dataclass(eq=False)
class Function:
    """A function or method. `frame` is the frame that it is defined in."""

    node: cst.FunctionDef
    file: File
    frame: Frame
    cls: Class | None

    def __post_init__(self) -> None:
        self.name, params = str(self.node.name.value), self.node.params
        given = (*params.posonly_params, *params.params, *params.kwonly_params)
        self.parameters = tuple(str(each.name.value) for each in given)

    @functools.cached_property
    def line(self) -> int:
        """The line of the function's name."""
        return self.file.line(self.node.name)

    @functools.cached_property
    def is_bound(self) -> bool:
        """Whether this is a method that isn't static: its first parameter is its object or class."""
        return self.cls is not None and "staticmethod" not in self.decorators

    @property
    def is_nested(self) -> bool:
        """Whether the function is defined within another one, or within a block."""
        return self.frame.kind not in ("module", "class")

    @functools.cached_property
    def returns(self) -> list[Node]:
        """The expressions that the function returns."""
        inside = [each for each in self.file.inside(self.node.body) if isinstance(each, cst.Return)]
        return [each.value for each in inside if each.value is not None and self.file.function(each) is self.node]

    @functools.cached_property
    def yields(self) -> list[cst.Yield]:
        """The `yield` expressions of the function."""
        inside = [each for each in self.file.inside(self.node.body) if isinstance(each, cst.Yield)]
        return [each for each in inside if self.file.function(each) is self.node]

    @functools.cached_property
    def decorators(self) -> tuple[str, ...]:
        """The names of the decorators, with import aliases resolved."""
        named = [each.decorator for each in self.node.decorators]
        return tuple(self.file.full_name(each.func if isinstance(each, cst.Call) else each) for each in named)


class File:
    """One parsed file. Nodes compare by identity.

    Attributes:
        module: The syntax tree.
        source: The text; an empty one for a tree that was parsed without a file.
        module_name: The dotted name by which others import this file; its relative imports start from it.
        nodes: All nodes in the order of the text, without whitespace, punctuation and the insides of imports.
        frames: By node, its innermost frame.
        imports: By name in this file, the full name of what was imported.
        has_stars: Some names may come from `from module import *`.
        taken: (module, the name in this file for the module or for something of it). The name is "*" for all of it.
        bindings: By function (None: the module) and name, the nodes that bind the name, in order.
    """

    def __init__(self, module: cst.Module, source: Source | None = None, module_name: str = "") -> None:
        self.module, self.module_name = module, module_name
        self.source = source if source is not None else Source(Path(), "")
        self.nodes: list[Node] = []
        self.frames: dict[Node, Frame] = {}
        self._order: dict[Node, int] = {}
        self._ends: dict[Node, int] = {}
        self._parents: dict[Node, Node] = {}
        self._rounds: dict[Node, Frame] = {}
        self.all_functions: list[Function] = []
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, Class] = {}
        self.class_records: dict[Node, Class] = {}
        self.imports: dict[str, str] = {}
        self.taken: list[tuple[str, str]] = []
        self.has_stars = False
        self.bindings: dict[cst.FunctionDef | None, dict[str, list[Node]]] = {}
        self._walk()
        self._bind_names()

    # ------------------------------------------------------------------ places

    def parent(self, node: Node) -> Node | None:
        """The node directly around another; None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """The nodes around a node, from its parent to the module."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def order(self, node: Node) -> int:
        """The index of a node in `nodes`."""
        return self._order[node]

    @functools.cached_property
    def _places(self) -> dict[Node, tuple[int, int]]:
        return _Places(self.module).found

    def line(self, node: Node) -> int:
        """The line on which a node begins, from 1."""
        return self._places.get(node, (0, 0))[0]

    def column(self, node: Node) -> int:
        """The column in which a node begins, from 1."""
        return self._places.get(node, (0, 0))[1] + 1

    def code(self, node: Node) -> str:
        """The text of a node."""
        return text_of(node)

    def function(self, node: Node) -> cst.FunctionDef | None:
        """The function that a node is in; None at module level."""
        inside = self.frames[node].function
        return inside.node if inside is not None else None

    def class_of(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        """The class of a method."""
        around = self.frames[function].outwards()
        return next((each.node for each in around if isinstance(each.node, cst.ClassDef)), None)

    def statement(self, node: Node) -> Statement:
        """The innermost statement around a node: a line, a one-line body, or a compound statement."""
        if isinstance(node, Statement):
            return node
        return next(each for each in self.ancestors(node) if isinstance(each, Statement))

    def loops(self, node: Node) -> list[cst.For | cst.While]:
        """The loops of the same function around a node, innermost first."""
        return [each.node for each in self.frames[node].outwards() if isinstance(each.node, cst.For | cst.While)]

    def inside(self, node: Node) -> list[Node]:
        """A node and all nodes within it, in the order of the text."""
        return self.nodes[self._order[node] : self._ends[node]]

    def is_inside(self, node: Node, around: Node) -> bool:
        """Whether a node is `around` or lies within it."""
        return self._order[around] <= self._order[node] < self._ends[around]

    def parts(self, node: Node) -> list[cst.BaseExpression]:
        """The outermost expressions within a node, without names that only label an argument or attribute."""
        found: list[cst.BaseExpression] = []
        position, end = self._order[node] + 1, self._ends[node]
        while position < end:
            each = self.nodes[position]
            if isinstance(each, cst.BaseExpression):
                position = self._ends[each]
                if not isinstance(each, cst.Name) or self.is_read(each):
                    found.append(each)
            else:
                position += 1
        return found

    # ------------------------------------------------------------------ names

    def resolve(self, name: str) -> str:
        """A dotted name with the alias of its first part replaced by what was imported."""
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    def full_name(self, node: Node) -> str:
        """The dotted name of a name or attribute, with import aliases resolved; "" for other expressions."""
        name = dotted(node)
        return self.resolve(name) if name and self.scope(name.partition(".")[0], node) is None else name

    def qualified(self, node: Node) -> str | None:
        """The full name of something imported, such as "torch.optim.Adam" for `optim.Adam`; None for anything else."""
        if isinstance(node, cst.Name):
            return None if self.scope(node.value, node) is not None else self.imports.get(node.value)
        if isinstance(node, cst.Attribute):
            base = self.qualified(node.value)
            return None if base is None else f"{base}.{node.attr.value}"
        return None

    @functools.cached_property
    def used(self) -> set[str]:
        """All names and attributes that the code reads or sets."""
        own = (cst.FunctionDef, cst.ClassDef, cst.Param)
        return {each.value for each in self.nodes if type(each) is cst.Name and type(self._parents[each]) not in own}

    def names(self) -> set[str]:
        """All names in the file, and the local names of its imports."""
        return {node.value for node in self.nodes if isinstance(node, cst.Name)} | self.imports.keys()

    def scope(self, name: str, at: Node) -> cst.FunctionDef | None:
        """The function whose local variable `name` is, when used at node `at`; None: the module's."""
        inside = self.frames[at].function
        while inside is not None:
            if name in self.bindings.get(inside.node, ()):
                return inside.node
            inside = inside.frame.function
        return None

    def bound(self, name: str, at: Node) -> list[Node]:
        """The nodes that bind `name` as used at node `at`: targets, parameters, functions and classes."""
        return self.bindings.get(self.scope(name, at), {}).get(name, [])

    def is_read(self, node: Node) -> bool:
        """Whether an expression is a value: it is no name of an attribute or keyword, and no parameter of a lambda."""
        parent = self.parent(node)
        if (isinstance(parent, cst.Arg) and parent.keyword is node) or (
            isinstance(parent, cst.Attribute) and parent.attr is node
        ):
            return False
        lambdas = [each.node for each in self.frames[node].outwards() if isinstance(each.node, cst.Lambda)]
        own = {each.name.value for function in lambdas for each in function.params.params}
        return not isinstance(node, cst.Name) or node.value not in own

    # ------------------------------------------------------------------ records

    @functools.cached_property
    def calls(self) -> list[Call]:
        """The calls, outer ones first."""
        return [Call(node, self.frames[node]) for node in self.nodes if type(node) is cst.Call]

    @functools.cached_property
    def assignments(self) -> list[Assignment]:
        """The assignments of all kinds: statements, walrus expressions, `with` targets and loop targets."""
        found = []
        for node in (each for each in self.nodes if type(each) in _ASSIGNING):
            pairs: list[tuple[Node, Node | None]] = []
            match node:
                case cst.Assign():
                    pairs = [(each.target, node.value) for each in node.targets]
                case cst.AnnAssign() | cst.AugAssign() | cst.NamedExpr():
                    pairs = [(node.target, node.value)]
                case cst.With():
                    pairs = [(each.asname.name, each.item) for each in node.items if each.asname is not None]
                case cst.For() | cst.CompFor():
                    pairs = [(node.target, node.iter)]
            operator = text_of(node.operator) if isinstance(node, cst.AugAssign) else "="
            for target, value in pairs:
                if value is not None:
                    found.append(Assignment(target, value, self.frames[target], node, operator))
        return found

    @functools.cached_property
    def assigned(self) -> dict[str, list[Assignment]]:
        """By dotted name, the assignments whose target it is, alone or in a tuple."""
        found: dict[str, list[Assignment]] = {}
        for each in self.assignments:
            targets: list[Node] = [each.target]
            if isinstance(each.target, cst.Tuple | cst.List):
                targets = [one.value for one in each.target.elements]
            for name in {dotted(one) for one in targets}:
                found.setdefault(name, []).append(each)
        return found

    @functools.cached_property
    def all_loops(self) -> list[Loop]:
        """The loops, outer ones first."""
        found = [each for each in self.nodes if isinstance(each, cst.For | cst.While | cst.CompFor)]
        return [Loop(each, self.frames[each if isinstance(each, cst.CompFor) else each.body]) for each in found]

    @functools.cached_property
    def ifs(self) -> list[Frame]:
        """The frames of the branches in which the conditions of `if` statements hold."""
        return [self.frames[node.body] for node in self.nodes if isinstance(node, cst.If)]

    @functools.cached_property
    def slices(self) -> list[tuple[Node, Frame]]:
        """Slices, and the numbers that remainders are compared with (`i % n == k`): both may divide data."""
        found: list[Node] = []
        for node in self.nodes:
            match node:
                case cst.Subscript() if any(isinstance(each.slice, cst.Slice) for each in node.slice):
                    found += [each.slice for each in node.slice]
                case cst.Comparison(left=cst.BinaryOperation(operator=cst.Modulo())):
                    found.append(node.comparisons[0].comparator)
        return [(each, self.frames[each]) for each in found]

    # ------------------------------------------------------------------ the walk

    def _walk(self) -> None:
        waiting: list[tuple[Node, Frame]] = [(self.module, Frame("module", None, self))]
        while waiting:
            node, frame = waiting.pop()
            self._order[node] = len(self.nodes)
            self.nodes.append(node)
            self.frames[node] = frame
            if type(node) in (cst.Import, cst.ImportFrom):
                self._read_import(node)  # type: ignore[arg-type]
            # `type`, not `isinstance`, which takes longer for LibCST's abstract classes than the rest of the walk.
            inside = self._frames_inside(node, frame) if type(node) in _WITH_FRAMES else {}
            children = list[tuple[Node, Frame]]()
            for name in _parts_of(type(node)):
                part, where = getattr(node, name), inside.get(name, frame)
                if type(part) in (tuple, list):
                    for each in part:
                        children.append((each, where))
                        where = self._behind(each, where) if type(each) is cst.If else where
                elif part is not None and type(part) not in (str, bool, cst.MaybeSentinel):
                    children.append((part, where))
            for child, _ in children:
                self._parents[child] = node
            waiting += reversed(children)
        for node in reversed(self.nodes):
            end = self._ends.setdefault(node, self._order[node] + 1)
            if node in self._parents:
                self._ends.setdefault(self._parents[node], end)

    def _frames_inside(self, node: Node, frame: Frame) -> dict[str, Frame]:
        """By field of a node, the frame of that part, for the parts that are in another frame than the node."""

        def inside(kind: str, test: Node | None = None, *, holds: bool = True) -> Frame:
            return Frame(kind, frame, self, frame.function, node, test, holds)

        match node:
            case cst.If() | cst.IfExp():
                return {"body": inside("if", node.test), "orelse": inside("if", node.test, holds=False)}
            case cst.BooleanOperation():
                return {"right": inside("if", node.left, holds=isinstance(node.operator, cst.And))}
            case cst.For():
                loop = inside("loop")
                return {"target": loop, "body": loop}
            case cst.While():
                loop = inside("loop", node.test)
                return {"test": loop, "body": loop}
            case cst.With():
                return {"body": inside("with")}
            case cst.Try() | cst.TryStar():
                return {"body": inside("try"), "handlers": inside("except")}
            case cst.Lambda():
                own = inside("lambda")
                return {"params": own, "body": own}
            case cst.Param() if frame.parent is not None:
                return {"default": frame.parent}
            case cst.ClassDef():
                self.class_records[node] = self.classes[node.name.value] = Class(node, self)
                return {"body": inside("class")}
            case cst.FunctionDef():
                own = Frame("function", frame, self, self._function(node, frame), node)
                return {"params": own, "body": own}
            case cst.ListComp() | cst.GeneratorExp() | cst.SetComp() | cst.DictComp():
                innermost, part = frame, cast(cst.CompFor | None, node.for_in)
                while part is not None:
                    innermost = self._rounds[part] = Frame("loop", innermost, self, frame.function, node)
                    part = part.inner_for_in
                return {"for_in": self._rounds[node.for_in], "elt": innermost, "key": innermost, "value": innermost}
            case cst.CompFor() if frame.parent is not None:
                inner = {} if node.inner_for_in is None else {"inner_for_in": self._rounds[node.inner_for_in]}
                return {"iter": frame.parent, **inner}
        return {}

    def _behind(self, node: cst.If, frame: Frame) -> Frame:
        """The frame of the statements after an `if`: if one branch leaves the block, that of the other branch."""
        if node.orelse is None and leaves(node.body):
            return Frame("if", frame, self, frame.function, node, node.test, holds=False)
        if isinstance(node.orelse, cst.Else) and leaves(node.orelse.body):
            return Frame("if", frame, self, frame.function, node, node.test)
        return frame

    def _function(self, node: cst.FunctionDef, frame: Frame) -> Function:
        around = self.class_of(node)
        cls = self.class_records[around] if around is not None else None
        function = Function(node, self, frame, cls)
        self.all_functions.append(function)
        if cls is not None:
            cls.methods[function.name] = function
        else:
            self.functions.setdefault(function.name, function)
        return function

    def _read_import(self, node: cst.Import | cst.ImportFrom) -> None:
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = dotted(alias.name)
                given = text_of(alias.asname.name) if alias.asname is not None else name.partition(".")[0]
                self.imports[given] = name if alias.asname is not None else given
                self.taken.append((name, given))
            return
        package, module = self.module_name.split("."), dotted(node.module)
        if node.relative and self.module_name:
            parts = package[: max(0, len(package) - len(node.relative))]
            module = ".".join([*parts, *filter(None, [module])])
        else:
            module = "." * len(node.relative) + module
        if isinstance(node.names, cst.ImportStar):
            self.has_stars = True
            self.imports |= {name: f"{module}.{name}" for name in _STARRED.get(module, ())}
            self.taken.append((module, "*"))
            return
        for alias in node.names:
            name = dotted(alias.name)
            given = text_of(alias.asname.name) if alias.asname is not None else name
            self.imports[given] = f"{module}.{name}" if module else name
            self.taken += [(self.imports[given], given), (module, given)]

    def _bind_names(self) -> None:
        elsewhere: dict[tuple[cst.FunctionDef | None, str], cst.FunctionDef | None] = {}
        for node in self.nodes:
            if type(node) in _ELSEWHERE and isinstance(node, cst.Global | cst.Nonlocal):
                function = self.function(node)
                around = self.function(function) if function is not None and type(node) is cst.Nonlocal else None
                elsewhere |= {(function, item.name.value): around for item in node.names}
        bound: list[tuple[str, Node]] = [
            (node.name.value, node)
            for node in self.nodes
            if self._defines(node) and isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Param)
        ]
        for each in self.assignments:
            bound += [(name.value, name) for name in target_names(each.target)]
        for name, by in bound:
            function = self.function(by)
            owner = elsewhere.get((function, name), function)
            self.bindings.setdefault(owner, {}).setdefault(name, []).append(by)

    def _defines(self, node: Node) -> bool:
        """Whether a node binds its name in its scope: a function or class outside a class body, or a parameter."""
        kind = self.frames[node].kind
        is_plain = type(node) in (cst.FunctionDef, cst.ClassDef) and kind != "class"
        return is_plain or (type(node) is cst.Param and kind == "function")


@functools.cache
def _parts_of(kind: type[Node]) -> tuple[str, ...]:
    """The fields of a node type that hold other nodes, in the order of the text."""
    names = [each.name for each in dataclasses.fields(kind) if each.name not in _NO_PARTS]
    return _PARTS.get(kind, tuple(name for name in names if "whitespace" not in name))


class _Places(CodegenState):
    """Finds the line and column where each node of a tree begins.

    LibCST's own `PositionProvider` takes five times as long, because it also finds where nodes end.
    """

    def __init__(self, module: cst.Module) -> None:
        super().__init__(module.default_indent, module.default_newline)
        self.found: dict[Node, tuple[int, int]] = {}
        self.line, self.column = 1, 0
        module._codegen(self)

    def add_token(self, value: str) -> None:
        newlines = value.count("\n") or value.count("\r")
        self.line += newlines
        behind = len(value) - max(value.rfind("\n"), value.rfind("\r")) - 1
        self.column = behind if newlines else self.column + len(value)

    def add_indent_tokens(self) -> None:
        self.column += sum(map(len, self.indent_tokens))

    def before_codegen(self, node: Node) -> None:
        self.found[node] = self.line, self.column

    def record_syntactic_position(self, node: Node, **_: Any) -> Any:
        self.found[node] = self.line, self.column
        return _NOTHING


_NOTHING = contextlib.nullcontext()
