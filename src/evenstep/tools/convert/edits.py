"""Changes to a script, collected first and applied in one go: either all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import parse_template_expression

from evenstep.tools.convert.source import Node, Script

Change = Callable[[Any], Any]  # nodes of whatever class


# What needs parentheses where something else is said of it.
_OPERATIONS = (cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.Comparison, cst.IfExp, cst.Lambda)


@dataclass
class Edits:
    """What is to be changed; statements are named by a node of the script.

    Attributes:
        replaced: By expression, what makes its replacement of it, in the order in which they were asked for.
        before, after: By statement, the lines that are put there.
        guarded: Small statements that only the main rank runs.
        removed: Statements that go.
        comments: By statement, what is said above it.
        main: The condition that holds on the main rank.
    """

    script: Script
    main: str
    replaced: dict[Node, list[Change]] = field(default_factory=dict)
    before: dict[Node, list[str]] = field(default_factory=dict)
    after: dict[Node, list[str]] = field(default_factory=dict)
    guarded: set[Node] = field(default_factory=set)
    removed: set[Node] = field(default_factory=set)
    comments: dict[Node, list[str]] = field(default_factory=dict)

    def template(self, node: Node, template: str) -> None:
        """Replace an expression by a text in which {old} stands for it, as it is after the changes within it."""
        config = self.script.module.config_for_parsing

        def change(updated: cst.BaseExpression) -> cst.BaseExpression:
            if "{old}" not in template:
                return parse(template)
            before, _, after = template.partition("{old}")
            stands_alone = before[-1:] in ("(", "") and after[:1] in (")", ",", "")
            if isinstance(updated, _OPERATIONS) and not updated.lpar and not stands_alone:
                updated = updated.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            return parse_template_expression(template, config, old=updated)

        def parse(text: str) -> cst.BaseExpression:
            return cst.parse_expression(text, config)

        self.replaced.setdefault(node, []).append(change)

    def change(self, node: Node, change: Change) -> None:
        """Replace a node by what a function makes of it."""
        self.replaced.setdefault(node, []).append(change)

    def add(self, where: dict[Node, list[str]], statement: Node, line: str) -> None:
        """Add a line somewhere, once."""
        lines = where.setdefault(statement, [])
        if line not in lines:
            lines.append(line)

    def touched(self) -> list[Node]:
        """Every node that something happens to, in order of the text."""
        found: set[Node] = {*self.replaced, *self.before, *self.after, *self.guarded, *self.removed}
        return sorted(found, key=self.script.order)

    def apply(self) -> str:
        """The changed text."""
        changed = self.script.module.visit(_Applying(self))
        return changed.code


class _Applying(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits
        self._config = edits.script.module.config_for_parsing

    def on_leave(self, original: Any, updated: Any) -> Any:
        match updated:
            case cst.Module() | cst.IndentedBlock():
                updated = updated.with_changes(body=self._statements(original.body, updated.body))
            case cst.SimpleStatementSuite() if self._is_touched(original):
                # Behind a colon there is room for expressions alone.
                line = cst.SimpleStatementLine(body=updated.body, trailing_whitespace=updated.trailing_whitespace)
                updated = cst.IndentedBlock(body=self._statements([original], [line]))
        for change in self._edits.replaced.get(original, ()):
            updated = change(updated)
        return updated

    def _is_touched(self, suite: Node) -> bool:
        edits = self._edits
        smalls = getattr(suite, "body", ())
        return (
            suite in edits.before
            or suite in edits.after
            or suite in edits.comments
            or suite in edits.removed
            or any(small in edits.guarded for small in smalls)
        )

    def _lines(self, lines: Sequence[str]) -> list[Any]:
        if not lines:
            return []
        text = "".join(f"{line}\n" for line in lines)
        return list(cst.parse_module(text, self._config).body)

    def _statements(self, originals: Sequence[Any], updated: Sequence[Any]) -> list[Any]:
        guarded: list[tuple[Any, bool]] = []  # what follows one another, with whether it is for the main rank alone
        for original, statement in zip(originals, updated, strict=True):
            guarded += self._expand(original, statement)
        found = self._guard(guarded)
        return self._lines(["pass"]) if originals and not found else found

    def _expand(self, original: Any, statement: Any) -> list[tuple[Any, bool]]:
        """A statement with what comes before and behind it, and without what goes."""
        edits = self._edits
        parts: list[tuple[Any, bool]]
        if original in edits.removed:
            said = [line for line in statement.leading_lines if line.comment is not None]
            parts = [(each.with_changes(leading_lines=said), False) for each in self._lines(["pass"] if said else [])]
        elif isinstance(statement, cst.SimpleStatementLine) and isinstance(
            original, cst.BaseSuite | cst.SimpleStatementLine
        ):
            smalls = list(original.body)
            if any(small in edits.guarded for small in smalls):
                parts = self._split(smalls, statement)
            else:
                parts = [(statement, False)]
        else:
            parts = [(statement, original in edits.guarded)]
        lead_in: list[tuple[Any, bool]] = [(line, False) for line in self._lines(edits.before.get(original, ()))]
        if lead_in and parts:
            first, is_guarded = parts[0]
            leading = list(getattr(first, "leading_lines", ()))
            says = next((at for at, line in enumerate(leading) if line.comment is not None), len(leading))
            lead_in[0] = (lead_in[0][0].with_changes(leading_lines=leading[:says]), False)
            parts[0] = (first.with_changes(leading_lines=leading[says:]), is_guarded)
        behind: list[tuple[Any, bool]] = [(line, False) for line in self._lines(edits.after.get(original, ()))]
        whole = [*lead_in, *parts, *behind]
        for text in reversed(edits.comments.get(original, ())):
            if whole:
                first, is_guarded = whole[0]
                line = cst.EmptyLine(comment=cst.Comment(f"# {text}"))
                whole[0] = (first.with_changes(leading_lines=[*first.leading_lines, line]), is_guarded)
        return whole

    def _split(self, smalls: Sequence[Node], line: cst.SimpleStatementLine) -> list[tuple[Any, bool]]:
        """One line for each statement of a line with semicolons."""
        parts: list[tuple[Any, bool]] = []
        for index, (small, new) in enumerate(zip(smalls, line.body, strict=True)):
            single = cst.SimpleStatementLine(body=[new.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
            if index == 0:
                single = single.with_changes(leading_lines=line.leading_lines)
            if index == len(line.body) - 1:
                single = single.with_changes(trailing_whitespace=line.trailing_whitespace)
            parts.append((single, small in self._edits.guarded))
        return parts

    def _guard(self, statements: Sequence[tuple[Any, bool]]) -> list[Any]:
        """Put what is for the main rank alone under one `if`, where it follows one another."""
        found: list[Any] = []
        block: list[Any] = []

        def close() -> None:
            if not block:
                return
            first = block[0]
            leading = first.leading_lines
            inner = [first.with_changes(leading_lines=()), *block[1:]]
            test = cst.parse_expression(self._edits.main, self._config)
            found.append(cst.If(test=test, body=cst.IndentedBlock(body=inner), leading_lines=leading))
            block.clear()

        for statement, is_guarded in statements:
            if not is_guarded:
                close()
                found.append(statement)
                continue
            leading = statement.leading_lines
            if any(line.comment is None for line in leading):
                close()  # a paragraph of its own
            block.append(statement)
        close()
        return found


def with_argument(name: str, value: str) -> Change:
    """Add an argument to a call."""

    def change(updated: Any) -> Any:
        equal = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))
        added = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)
        arguments = list(updated.args)
        if arguments:
            last = arguments[-1]
            if isinstance(last.comma, cst.Comma):  # a call over several lines keeps its last comma
                added = added.with_changes(comma=last.comma)
                between = (
                    arguments[-2].comma
                    if len(arguments) > 1
                    else cst.Comma(cst.SimpleWhitespace(""), cst.SimpleWhitespace(" "))
                )
                arguments[-1] = last.with_changes(comma=between)
            else:
                arguments[-1] = last.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(args=[*arguments, added])

    return change
