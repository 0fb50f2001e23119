"""A script as records: its calls, assignments, loops and functions, each with the place where it stands.

LibCST parses; one walk turns its tree into what rules ask about, so that no rule walks trees. A *frame* is what a
statement stands in: a function, a class, a loop, a branch of an `if`, a `with`. After `if rank != 0: return` the rest
of the block stands in the other branch of that `if`.
"""

from __future__ import annotations

import ast
import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from evenstep.errors import ConfigurationError
from evenstep.tools.reading.source import Source, read_source

MOST_NESTING = 300
# Of the modules that a script imports; more would take longer than anybody waits for a look at a script.
MOST_FILES = 20
MOST_LINES = 10_000

_EMPTY = cst.Module([])


@functools.lru_cache(1 << 16)
def text_of(node: cst.CSTNode | None) -> str:
    """A node as it is written."""
    return "" if node is None else str(_EMPTY.code_for_node(node)).strip()


def dotted(node: cst.CSTNode | None) -> str:
    """`a.b.c` of names and attributes; a subscript's value counts for it; "" for anything else."""
    match node:
        case cst.Name():
            return str(node.value)
        case cst.Attribute():
            before = dotted(node.value)
            return f"{before}.{node.attr.value}" if before else ""
        case cst.Subscript():
            return dotted(node.value)
    return ""


@dataclass(eq=False)
class Frame:
    """What a statement stands in; frames are linked from the innermost outwards.

    Attributes:
        kind: "module", "class", "function", "loop", "if", "with" or "try".
        parent: The next frame outwards.
        function: The function that it lies in; None at the top level.
        node: The statement.
        test: Of an `if` or `while`, the condition.
        holds: Of an `if`: True in the branch where the condition holds.
        line: Of an `if`, counted from 1; else 0.
    """

    kind: str
    parent: Frame | None
    file: File
    function: Function | None = None
    node: cst.CSTNode | None = None
    test: cst.CSTNode | None = None
    holds: bool = True
    line: int = 0

    def outwards(self) -> Iterator[Frame]:
        """This frame and those around it, as far as the function or module it lies in."""
        frame: Frame | None = self
        while frame is not None and frame.function is self.function:
            yield frame
            frame = frame.parent


@dataclass(eq=False)
class Call:
    """One call. `name` has import aliases resolved: "torch.nn.parallel.DistributedDataParallel", "optimizer.step"."""

    node: cst.Call
    name: str
    frame: Frame
    line: int
    column: int

    @functools.cached_property
    def last(self) -> str:
        """The name behind the last dot."""
        if self.name:
            return self.name.rpartition(".")[2]
        return str(self.node.func.attr.value) if isinstance(self.node.func, cst.Attribute) else ""

    @property
    def receiver(self) -> cst.CSTNode | None:
        """What stands before the last dot."""
        return self.node.func.value if isinstance(self.node.func, cst.Attribute) else None

    @property
    def text(self) -> str:
        """As it is written, on one line, shortened."""
        return shortened(text_of(self.node))

    def positional(self, index: int) -> cst.CSTNode | None:
        """The value of a positional argument."""
        plain = [each for each in self.node.args if each.keyword is None and not each.star]
        return plain[index].value if index < len(plain) else None

    def argument(self, keyword: str, index: int | None = None) -> cst.CSTNode | None:
        """The value of a keyword argument, or of a positional one."""
        for each in self.node.args:
            if each.keyword is not None and each.keyword.value == keyword:
                return each.value
        return None if index is None else self.positional(index)

    @property
    def arguments(self) -> list[cst.CSTNode]:
        """The values of all arguments."""
        return [each.value for each in self.node.args]

    @property
    def has_star(self) -> bool:
        """True if arguments are passed that can't be read: `*args`, `**kwargs`."""
        return any(each.star for each in self.node.args)


@dataclass(eq=False)
class Assignment:
    """`target = value`; also of `with value as target` and, with `each`, of `for target in value`."""

    target: cst.CSTNode
    value: cst.CSTNode
    frame: Frame
    line: int
    operator: str = "="
    each: bool = False


@dataclass(eq=False)
class Function:
    """A function or method."""

    name: str
    file: File
    node: cst.FunctionDef
    cls: Class | None
    frame: Frame
    line: int
    parameters: tuple[str, ...] = ()
    returns: list[cst.CSTNode] = field(default_factory=list)
    yields: bool = False
    decorators: tuple[str, ...] = ()


@dataclass(eq=False)
class Class:
    """A class."""

    name: str
    file: File
    node: cst.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Loop:
    """A `for` or `while`."""

    frame: Frame  # that of its body
    line: int
    column: int
    iterates: cst.CSTNode | None  # None for a `while`
    is_comprehension: bool = False


@dataclass(eq=False)
class File:
    """One file that was read.

    Attributes:
        source: Its text.
        module: The dotted name by which others import it, and so its own relative imports begin; "" at the top.
        tree: As LibCST has parsed it.
        imports: By name in this file, what was imported.
        modules: (module, name in this file that stands for it or for something of it); "*" for all of its names.
        names: All names and attributes that the code reads or sets.
        slices: Slices, and what remainders are compared with, with their frames: they may divide data.
    """

    source: Source
    module: str
    tree: cst.Module
    imports: dict[str, str] = field(default_factory=dict)
    modules: list[tuple[str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    slices: list[tuple[cst.CSTNode, Frame]] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    ifs: list[Frame] = field(default_factory=list)
    all_functions: list[Function] = field(default_factory=list)

    @functools.cached_property
    def assigned(self) -> dict[str, list[Assignment]]:
        """By name, its assignments, alone or in a tuple."""
        found: dict[str, list[Assignment]] = {}
        for each in self.assignments:
            targets: list[cst.CSTNode] = [each.target]
            if isinstance(each.target, cst.Tuple | cst.List):
                targets = [one.value for one in each.target.elements]
            for name in {dotted(one) for one in targets}:
                found.setdefault(name, []).append(each)
        return found

    def resolve(self, name: str) -> str:
        """A dotted name with the alias of its first part replaced by what was imported."""
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest


def read_file(path: Path, module: str = "") -> File:
    """Read and parse one file.

    Raises:
        ConfigurationError: It can't be read, or is not python.
    """
    source = read_source(path)
    _validate_python(source)
    try:
        wrapper = MetadataWrapper(cst.parse_module(source.text), unsafe_skip_copy=True)
        file = File(source, module, wrapper.module)
        _Walk(file, wrapper.resolve(PositionProvider)).module()
    except cst.ParserSyntaxError as error:
        message = error.message.splitlines()[0]
        raise ConfigurationError(f"{_told(source, error.raw_line)}: LibCST can't read this: {message}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: an expression is nested too deeply to be read.") from error
    return file


def _validate_python(source: Source) -> None:
    """Refuse what python itself doesn't take, with its own words, and what LibCST's parser would die of.

    That one recurses in native code: thousands of parentheses overflow the stack and end the process.
    """
    path = source.path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script: invalid escapes, `is` with a literal
            tree = ast.parse(source.text)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigurationError(
            f"{_told(source, error.lineno or 1)}: this is not python {version}: {error.msg}."
        ) from error
    except (RecursionError, MemoryError) as error:  # whose words differ between versions of python
        raise ConfigurationError(f"{path}: an expression is nested too deeply to be read.") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: can't be parsed: {error}.") from error
    pending: list[tuple[ast.AST, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > MOST_NESTING:
            raise ConfigurationError(f"{path}: statements or expressions are nested more than {MOST_NESTING} deep.")
        pending += [(child, depth + 1) for child in ast.iter_child_nodes(node)]


def _told(source: Source, line: int) -> str:
    shown, cell = source.place(line)
    return f"{source.path}:{shown}" if cell is None else f"{source.path}, cell {cell}:{shown}"


def read_program(path: Path) -> tuple[list[File], dict[str, File], list[str]]:
    """Read a script, and of its own modules those that something is taken from, from module to module.

    Returns:
        (files, the script first; modules by the names under which they are imported; notes about what wasn't read).
    """
    folders = [path.parent]
    while (folders[-1] / "__init__.py").is_file():  # a script inside a package: `from package.data import ...`
        folders.append(folders[-1].parent)
    inside = path.absolute().relative_to(folders[-1].absolute()).with_suffix("")
    script = read_file(path, ".".join(inside.parts))
    files, modules, notes = [script], {}, []
    read = {path.resolve(): script}
    num_lines = script.source.text.count("\n")
    for file in files:  # which grows
        for name, local in file.modules:
            target = next((found for each in folders if (found := _module_file(each, name))), None)
            if not name or target is None or name in modules or (local not in file.names and local != "*"):
                continue
            key = target.resolve()
            if key not in read:
                try:
                    if len(files) == MOST_FILES or num_lines > MOST_LINES:
                        raise ConfigurationError(
                            "the script and its modules have more lines or files than are followed."
                        )
                    read[key] = read_file(target, name if target.stem != "__init__" else f"{name}.__init__")
                except ConfigurationError as error:
                    notes.append(f"{target} was not read: {error}")
                    continue
                files.append(read[key])
                num_lines += read[key].source.text.count("\n")
            modules[name] = read[key]
    for file in reversed(files):
        for name, local in file.modules:
            if local == "*" and name in modules:
                star = modules[name]
                taken = {each: f"{name}.{each}" for each in (*star.functions, *star.classes)}
                file.imports.update({**star.imports, **taken, **file.imports})
    return files, modules, notes


def _module_file(folder: Path, name: str) -> Path | None:
    """The file of a module below a folder, or None."""
    base = folder.joinpath(*name.split("."))
    return next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)


class _Walk:
    """One pass over a tree, statement by statement."""

    def __init__(self, file: File, positions: Mapping[cst.CSTNode, Any]) -> None:
        self.file = file
        self.positions = positions

    def module(self) -> None:
        self._block(self.file.tree.body, Frame("module", None, self.file))

    def _at(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self.positions[node].start
        return int(start.line), int(start.column) + 1

    def _block(self, body: Sequence[cst.CSTNode], frame: Frame) -> None:
        for statement in body:
            if isinstance(statement, cst.SimpleStatementLine | cst.SimpleStatementSuite):
                for small in statement.body:
                    self._small(small, frame)
            else:
                frame = self._compound(statement, frame)

    def _body(self, suite: cst.CSTNode, frame: Frame) -> None:
        body = getattr(suite, "body", ())
        if isinstance(suite, cst.SimpleStatementSuite):
            for small in body:
                self._small(small, frame)
        else:
            self._block(body, frame)

    def _compound(self, node: cst.CSTNode, frame: Frame) -> Frame:
        """Walk a statement with a body; returns the frame of what follows it in the same block."""

        def inside(kind: str, test: cst.CSTNode | None = None, holds: bool = True) -> Frame:
            return Frame(kind, frame, self.file, frame.function, node, test, holds)

        match node:
            case cst.FunctionDef():
                self._function(node, frame)
            case cst.ClassDef():
                self._class(node, frame)
            case cst.If():
                self._expressions(node.test, frame)
                branch = inside("if", node.test)
                branch.line, _ = self._at(node)
                self.file.ifs.append(branch)
                self._body(node.body, branch)
                other = inside("if", node.test, holds=False)
                if node.orelse is not None:
                    if isinstance(node.orelse, cst.If):
                        self._compound(node.orelse, other)
                    else:
                        self._body(node.orelse.body, other)
                elif leaves(node.body):
                    return other
                if node.orelse is not None and isinstance(node.orelse, cst.Else) and leaves(node.orelse.body):
                    return branch
            case cst.For():
                self._expressions(node.iter, frame)
                line, column = self._at(node)
                loop = inside("loop")
                self.file.loops.append(Loop(loop, line, column, node.iter))
                self.file.assignments.append(Assignment(node.target, node.iter, loop, line, each=True))
                self._body(node.body, loop)
                if node.orelse is not None:
                    self._body(node.orelse.body, frame)
            case cst.While():
                line, column = self._at(node)
                loop = inside("loop", node.test)
                self._expressions(node.test, loop)
                self.file.loops.append(Loop(loop, line, column, None))
                self._body(node.body, loop)
                if node.orelse is not None:
                    self._body(node.orelse.body, frame)
            case cst.With():
                for item in node.items:
                    self._expressions(item.item, frame)
                    if item.asname is not None:
                        line, _ = self._at(node)
                        self.file.assignments.append(Assignment(item.asname.name, item.item, frame, line))
                self._body(node.body, inside("with"))
            case cst.Try() | cst.TryStar():
                self._body(node.body, inside("try"))
                for handler in node.handlers:
                    self._body(handler.body, inside("except"))
                for part in (node.orelse, node.finalbody):
                    if part is not None:
                        self._body(part.body, frame)
            case _:  # match and whatever is still to come
                self._expressions(node, frame)
        return frame

    def _function(self, node: cst.FunctionDef, frame: Frame) -> None:
        for decorator in node.decorators:
            self._expressions(decorator.decorator, frame)
        cls = self.file.classes.get(frame.node.name.value) if isinstance(frame.node, cst.ClassDef) else None
        parameters = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
        line, _ = self._at(node.name)
        function = Function(
            node.name.value,
            self.file,
            node,
            cls,
            frame,
            line,
            tuple(str(each.name.value) for each in parameters),
            decorators=tuple(
                self.file.resolve(
                    dotted(each.decorator.func if isinstance(each.decorator, cst.Call) else each.decorator)
                )
                for each in node.decorators
            ),
        )
        self.file.all_functions.append(function)
        if cls is not None:
            cls.methods[function.name] = function
        else:
            self.file.functions.setdefault(function.name, function)
        for each in parameters:
            if each.default is not None:
                self._expressions(each.default, frame)
        self._body(node.body, Frame("function", frame, self.file, function, node))

    def _class(self, node: cst.ClassDef, frame: Frame) -> None:
        bases = tuple(self.file.resolve(dotted(each.value)) for each in node.bases)
        for each in node.bases:
            self._expressions(each.value, frame)
        name = str(node.name.value)
        self.file.classes[name] = Class(name, self.file, node, bases)
        self._body(node.body, Frame("class", frame, self.file, frame.function, node))

    def _small(self, node: cst.CSTNode, frame: Frame) -> None:
        line, _ = self._at(node)
        match node:
            case cst.Import():
                for alias in node.names:
                    name = dotted(alias.name)
                    if alias.asname is not None:
                        self.file.imports[text_of(alias.asname.name)] = name
                    else:
                        self.file.imports.setdefault(name.partition(".")[0], name.partition(".")[0])
                    given = text_of(alias.asname.name) if alias.asname is not None else name.partition(".")[0]
                    self.file.modules.append((name, given))
            case cst.ImportFrom():
                package = self.file.module.split(".")
                parts = package[: max(0, len(package) - len(node.relative))] if node.relative else []
                module = ".".join([*parts, *filter(None, [dotted(node.module)])])
                if isinstance(node.names, cst.ImportStar):
                    self.file.modules.append((module, "*"))
                    return
                for alias in node.names:
                    given = text_of(alias.asname.name) if alias.asname is not None else dotted(alias.name)
                    self.file.imports[given] = f"{module}.{dotted(alias.name)}" if module else dotted(alias.name)
                    self.file.modules += [(self.file.imports[given], given), (module, given)]
            case cst.Assign():
                self._expressions(node.value, frame)
                for target in node.targets:
                    self._expressions(target.target, frame)
                    self.file.assignments.append(Assignment(target.target, node.value, frame, line))
            case cst.AnnAssign():
                if node.value is not None:
                    self._expressions(node.value, frame)
                    self.file.assignments.append(Assignment(node.target, node.value, frame, line))
            case cst.AugAssign():
                self._expressions(node.value, frame)
                operator = text_of(node.operator)
                self.file.assignments.append(Assignment(node.target, node.value, frame, line, operator))
            case cst.Return():
                if node.value is not None:
                    self._expressions(node.value, frame)
                    if frame.function is not None:
                        frame.function.returns.append(node.value)
            case _:
                self._expressions(node, frame)

    def _expressions(self, node: cst.CSTNode, frame: Frame) -> None:
        """Record the calls of an expression, outer ones first; branches of `a if b else c` stand in frames of an if."""
        match node:
            case cst.Call():
                line, column = self._at(node)
                name = self.file.resolve(dotted(node.func)) if dotted(node.func) else ""
                self.file.calls.append(Call(node, name, frame, line, column))
            case cst.Subscript() if any(isinstance(each.slice, cst.Slice) for each in node.slice):
                self.file.slices += [(each.slice, frame) for each in node.slice]
            case cst.Comparison(left=cst.BinaryOperation() as left) if isinstance(left.operator, cst.Modulo):
                self.file.slices.append((node.comparisons[0].comparator, frame))
            case cst.Yield():
                if frame.function is not None:
                    frame.function.yields = True
            case cst.IfExp():
                self._expressions(node.test, frame)
                for part, holds in ((node.body, True), (node.orelse, False)):
                    self._expressions(part, Frame("if", frame, self.file, frame.function, node, node.test, holds))
                return
            case cst.BooleanOperation() if isinstance(node.operator, cst.And | cst.Or):
                holds = isinstance(node.operator, cst.And)
                self._expressions(node.left, frame)
                self._expressions(node.right, Frame("if", frame, self.file, frame.function, node, node.left, holds))
                return
            case cst.ListComp() | cst.GeneratorExp() | cst.SetComp() | cst.DictComp():
                self._comprehension(node, frame)
                return
            case cst.Lambda():
                frame = Frame("lambda", frame, self.file, frame.function, node)
            case cst.Name():
                self.file.names.add(node.value)
                return
            case cst.BaseNumber() | cst.SimpleString():
                return
            case cst.IndentedBlock() | cst.SimpleStatementLine():  # the cases of a `match`
                self._body(node, frame) if isinstance(node, cst.IndentedBlock) else self._block([node], frame)
                return
        for child in node.children:
            self._expressions(child, frame)

    def _comprehension(self, node: cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp, frame: Frame) -> None:
        """Its `for` is a loop around its element."""
        line, column = self._at(node)
        part: cst.CompFor | None = node.for_in
        while part is not None:
            self._expressions(part.iter, frame)
            loop = Frame("loop", frame, self.file, frame.function, node)
            self.file.loops.append(Loop(loop, line, column, part.iter, is_comprehension=True))
            self.file.assignments.append(Assignment(part.target, part.iter, loop, line, each=True))
            frame = loop
            for condition in part.ifs:
                self._expressions(condition.test, frame)
            part = part.inner_for_in
        for element in (node.key, node.value) if isinstance(node, cst.DictComp) else (node.elt,):
            self._expressions(element, frame)


def leaves(suite: cst.CSTNode) -> bool:
    """True if a block ends by leaving: return, raise, continue, break or sys.exit()."""
    body = getattr(suite, "body", ())
    if not body:
        return False
    last = body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
        return dotted(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, cst.Return | cst.Raise | cst.Continue | cst.Break)


def shortened(text: str, length: int = 100) -> str:
    """A text on one line, cut in its middle if it is long."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 20]} ... {text[-15:]}"
