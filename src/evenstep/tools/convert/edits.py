"""The changes and remarks of a conversion, collected first and then applied all at once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any

import libcst as cst
from libcst.helpers import parse_template_expression

from evenstep.tools.convert.losses import Losses
from evenstep.tools.convert.values import Flow
from evenstep.tools.reading.tree import File as Script
from evenstep.tools.reading.tree import Node
from evenstep.tools.reading.values import arguments

Change = Callable[[Any], Any]  # takes and returns nodes of any class
Line = str | tuple[str, Node]  # a statement's text, or a name and the expression that is assigned to it


# Expressions that need parentheses inside another expression.
_OPERATIONS = (cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp, cst.Lambda)


@dataclass
class Edits:
    """The collected changes of a script, by the nodes that they belong to.

    Attributes:
        main: The expression that is true on the main rank only.
        replaced: By expression, functions that make its replacement, in the order in which they were added.
        before, after: By statement, the lines to insert before and after it.
        guarded: Small statements that only the main rank runs, each in a line of its own.
        removed: Statements to remove.
        comments: By statement, the comments to insert above it.
    """

    script: Script
    main: str
    replaced: dict[Node, list[Change]] = field(default_factory=dict)
    before: dict[Node, list[Line]] = field(default_factory=dict)
    after: dict[Node, list[Line]] = field(default_factory=dict)
    guarded: set[Node] = field(default_factory=set)
    removed: set[Node] = field(default_factory=set)
    comments: dict[Node, list[str]] = field(default_factory=dict)
    _moved: dict[Node, str] = field(default_factory=dict)

    def template(self, node: Node, template: str) -> None:
        """Replace an expression by a text, in which {old} is the expression after the changes within it."""
        config = self.script.module.config_for_parsing

        def change(updated: cst.BaseExpression) -> cst.BaseExpression:
            if "{old}" not in template:
                return cst.parse_expression(template, config)
            before, _, after = template.partition("{old}")
            stands_alone = before[-1:] in ("(", "") and after[:1] in (")", ",", "")
            if isinstance(updated, _OPERATIONS) and not updated.lpar and not stands_alone:
                updated = updated.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            return parse_template_expression(template, config, old=updated)

        self.change(node, change)

    def change(self, node: Node, change: Change) -> None:
        """Replace a node by the result of calling `change` with it."""
        self.replaced.setdefault(node, []).append(change)

    def add(self, where: dict[Node, list[Any]], statement: Node, line: Line) -> None:
        """Add a line to `before`, `after` or `comments` of a statement, unless it is there already."""
        lines = where.setdefault(statement, [])
        if line not in lines:
            lines.append(line)

    def move(self, node: Node, statement: Node | None, name: str) -> None:
        """Replace an expression by a name, and assign its changed value to the name in a line before a statement.

        Args:
            node: The expression.
            statement: None if an equal expression has been assigned to the name already.
            name: The name.
        """
        self._moved[node] = name
        if statement is not None:
            self.add(self.before, statement, (name, node))

    def touched(self) -> list[Node]:
        """The nodes that are changed, moved, guarded, removed or get new lines, in the order of the text."""
        found: set[Node] = {*self.replaced, *self._moved, *self.before, *self.after, *self.guarded, *self.removed}
        return sorted(found, key=self.script.order)

    def apply(self) -> str:
        """Apply all changes and return the new text."""
        changed = self.script.module.visit(_Applying(self, self._moved))
        return changed.code


@dataclass(frozen=True, order=True)
class Remark:
    """A remark for the user about a line of the original script."""

    line: int
    text: str


@dataclass
class Work:
    """The state of one conversion.

    Attributes:
        script, flow, losses: The script, the values of its expressions, and the kinds of its numbers.
        edits: The changes so far.
        world: The name of evenstep's world in the converted script.
        launch: The command that starts the script on two ranks.
        problems: Why the script can't be converted; if there are any, it is left as it is.
        notes: Remarks on what was left as it is or decided, and why.
        collectives: By expression, the template of the collective that replaces it.
    """

    script: Script
    flow: Flow
    losses: Losses
    edits: Edits
    world: str
    launch: str
    problems: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    collectives: dict[Node, str] = field(default_factory=dict)

    def refuse(self, node: Node, text: str) -> None:
        """Record why the script can't be converted."""
        remark = Remark(self.script.line(node), text)
        if remark not in self.problems:
            self.problems.append(remark)

    def note(self, node: Node, text: str, *, mark: bool = False) -> None:
        """Record a remark for the user; with `mark`, also as a comment above the statement."""
        remark = Remark(self.script.line(node), text)
        if remark not in self.notes:
            self.notes.append(remark)
        if mark:
            self.edits.add(self.edits.comments, self.script.statement(node), f"evenstep convert: {text}")

    def remove(self, node: Node) -> None:
        """Remove the statement of a node, if it is alone on its line."""
        statement = self.script.statement(node)
        if len(getattr(statement, "body", ())) == 1:
            self.edits.removed.add(statement)

    @property
    def total(self) -> str:
        """A template for a number's sum over ranks; {old} is this rank's number."""
        return f"sum({self.world}.exchange({{old}}))"

    def unseen(self, call: cst.Call, by_hand: str, changed: Iterable[str], *, in_all: str = "") -> str | None:
        """A problem text if `*` or `**` of a call may hold an argument that convert changes; None if they don't.

        Args:
            call: The call whose arguments are changed.
            by_hand: The arguments that the user should write out, as code, if they are known.
            changed: The names of the arguments that convert changes.
            in_all: An argument of `changed` that is allowed if every possible dictionary holds it.
        """
        for argument in (each for each in call.args if each.star):
            held = {frozenset({*changed} & {*each}) for each in self.settings(argument.value)}
            if held not in ({frozenset()}, {frozenset({in_all})}):
                unpacked, function = f"{argument.star}{self.script.code(argument.value)}", self.script.code(call.func)
                text = f"{unpacked} passes arguments to {function} that convert doesn't see: write them out in the call"
                return f"{text} ({by_hand})" if by_hand else text
        return None

    def given(self, loader: cst.Call, name: str) -> list[Node]:
        """The expressions that may be passed to a loader for an argument, also through unpacked dictionaries."""
        own: dict[str, Node] = {key: each.value for key, each in arguments(loader, ("dataset", "batch_size")).items()}
        unpacked = [each for argument in loader.args if argument.star for each in self.settings(argument.value)]
        return [each[name] for each in (own, *unpacked) if name in each]

    def settings(self, name: Node, *, may_grow: bool = True) -> list[dict[str, Node]]:
        """The dictionaries that a name may hold; empty if one isn't written out in the file, or is changed.

        Args:
            name: The name; for other expressions the result is empty.
            may_grow: Whether `update` may add other dictionaries to them.
        """
        script, added = self.script, list[list[dict[str, Node]]]()
        if not isinstance(name, cst.Name):
            return []
        scope = script.scope(name.value, name)
        same = [each for each in script.nodes if isinstance(each, cst.Name) and each.value == name.value]
        for node in (each for each in same if script.is_read(each) and script.scope(each.value, each) is scope):
            match [*islice(script.ancestors(node), 2)]:
                case [cst.AssignTarget(), cst.Assign(targets=[_])]:
                    pass
                case [cst.Arg(star=star), cst.Call() as call] if star == "**" or self.short(call) == "update":
                    pass
                case [cst.Attribute(), cst.Call(args=[cst.Arg(keyword=None) as given]) as call] if (
                    may_grow and self.short(call) == "update"
                ):
                    added.append(_written(given.value) or self.settings(given.value, may_grow=False))
                case _:
                    return []
        held = [_written(each.value) for each in self.losses.definitions(name)]
        return [one | more for one in chain(*held) for more in ({}, *chain(*added))] if all([*held, *added]) else []

    def average(self, node: Node, weight: str) -> None:
        """Replace an expression by its weighted mean over ranks."""
        self.collectives.setdefault(node, f"{self.world}.mean({{old}}, weight={weight})")

    def add_up(self, node: Node) -> None:
        """Replace an expression by its sum over ranks."""
        self.collectives.setdefault(node, self.total)

    def seeds(self, *, are_numbers: bool) -> list[cst.Call]:
        """The calls of `torch.manual_seed` with a literal number, or those with another expression."""
        calls = [call for call in self.calls() if self.script.qualified(call.func) == "torch.manual_seed" and call.args]
        return [call for call in calls if isinstance(call.args[0].value, cst.Integer) == are_numbers]

    def calls(self) -> list[cst.Call]:
        """All calls of the script, in the order of the text."""
        return [node for node in self.script.nodes if isinstance(node, cst.Call)]

    def short(self, call: cst.Call) -> str:
        """The last part of the called name: "step" for `optimizer.step()`."""
        return self.script.code(call.func).rsplit(".", 1)[-1]

    def unused(self, name: str) -> str:
        """Reserve a name that the script doesn't use yet."""
        taken = self.script.names() | self._given
        found = next(each for number in count(1) if (each := f"{name}_{number}".removesuffix("_1")) not in taken)
        self._given.add(found)
        return found

    _given: set[str] = field(default_factory=set)


def _written(node: Node) -> list[dict[str, Node]]:
    """The dictionaries that an expression writes out; empty if it may be another one."""
    match node:
        case cst.IfExp():
            either = [_written(node.body), _written(node.orelse)]
            return [*chain(*either)] if all(either) else []
        case cst.Dict(elements=elements) if all(
            isinstance(each, cst.DictElement) and isinstance(each.key, cst.SimpleString) for each in elements
        ):
            return [{each.key.evaluated_value: each.value for each in elements}]  # type: ignore[attr-defined]
        case cst.Call(func=cst.Name(value="dict"), args=args) if all(each.keyword is not None for each in args):
            return [{each.keyword.value: each.value for each in args}]  # type: ignore[union-attr]
    return []


class _Applying(cst.CSTTransformer):
    def __init__(self, edits: Edits, moved: dict[Node, str]) -> None:
        super().__init__()
        self._edits, self._moved = edits, moved
        self._config = edits.script.module.config_for_parsing
        self._done: dict[Node, str] = {}  # by moved expression, its code after its changes
        changed: tuple[Iterable[Node], ...] = (edits.before, edits.after, edits.comments, edits.removed)
        self._touched = {*chain(*changed), *map(edits.script.statement, edits.guarded)}

    def on_leave(self, original: Any, updated: Any) -> Any:
        match updated:
            case cst.Module() | cst.IndentedBlock():
                updated = updated.with_changes(body=self._statements(original.body, updated.body))
            case cst.SimpleStatementSuite() if original in self._touched:
                # A suite on the line of its colon has no room for new lines.
                line = cst.SimpleStatementLine(body=updated.body, trailing_whitespace=updated.trailing_whitespace)
                updated = cst.IndentedBlock(body=self._statements([original], [line]))
        for change in self._edits.replaced.get(original, ()):
            updated = change(updated)
        if original in self._moved:
            self._done[original] = self._edits.script.module.code_for_node(updated)
            return cst.Name(self._moved[original])
        return updated

    def _lines(self, lines: Sequence[Line]) -> list[Any]:
        texts = [line if isinstance(line, str) else f"{line[0]} = {self._done[line[1]]}" for line in lines]
        text = "".join(f"{line}\n" for line in texts)
        return list(cst.parse_module(text, self._config).body) if text else []

    def _statements(self, originals: Sequence[Any], updated: Sequence[Any]) -> list[Any]:
        """A body with the lines added before and after its statements, and guarded statements under an `if`."""
        found: list[Any] = []
        test = cst.parse_expression(self._edits.main, self._config)
        follows = False  # whether the statement before is guarded, too
        for original, statement in zip(originals, updated, strict=True):
            for each, is_guarded in self._expand(original, statement):
                # A statement after a blank line gets an `if` of its own.
                if is_guarded and follows and all(line.comment is not None for line in each.leading_lines):
                    block = found[-1].body
                    found[-1] = found[-1].with_changes(body=block.with_changes(body=[*block.body, each]))
                elif is_guarded:
                    body = cst.IndentedBlock(body=[each.with_changes(leading_lines=())])
                    found.append(cst.If(test=test, body=body, leading_lines=each.leading_lines))
                else:
                    found.append(each)
                follows = is_guarded
        return self._lines(["pass"]) if originals and not found else found

    def _expand(self, original: Any, statement: Any) -> list[tuple[Any, bool]]:
        """(statement, whether only the main rank runs it), for a statement and the lines added around it."""
        edits = self._edits
        if original in edits.removed:
            said = [line for line in statement.leading_lines if line.comment is not None]
            parts = [(each.with_changes(leading_lines=said), False) for each in self._lines(["pass"] if said else [])]
        else:
            smalls = original.body if isinstance(statement, cst.SimpleStatementLine) else ()
            parts = [(statement, not edits.guarded.isdisjoint(smalls))]
        lead_in = [(line, False) for line in self._lines(edits.before.get(original, ()))]
        if lead_in and parts:
            # Blank lines move before the first new line; comments stay with the statement.
            first, is_guarded = parts[0]
            leading = list(first.leading_lines)
            says = next((at for at, line in enumerate(leading) if line.comment is not None), len(leading))
            lead_in[0] = (lead_in[0][0].with_changes(leading_lines=leading[:says]), False)
            parts[0] = (first.with_changes(leading_lines=leading[says:]), is_guarded)
        whole = [*lead_in, *parts, *((line, False) for line in self._lines(edits.after.get(original, ())))]
        comments = [cst.EmptyLine(comment=cst.Comment(f"# {text}")) for text in edits.comments.get(original, ())]
        if whole and comments:
            first, is_guarded = whole[0]
            whole[0] = (first.with_changes(leading_lines=[*first.leading_lines, *reversed(comments)]), is_guarded)
        return whole


def with_argument(name: str, value: str) -> Change:
    """A change that adds a keyword argument to a call."""

    def change(updated: Any) -> Any:
        equal = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
        added = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
        arguments = list(updated.args)
        if arguments:  # a call over several lines keeps its last comma
            added = added.with_changes(comma=arguments[-1].comma)
            between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            arguments[-1] = arguments[-1].with_changes(comma=between)
        return updated.with_changes(args=[*arguments, added])

    return change
