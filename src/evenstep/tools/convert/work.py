"""What the parts of a conversion share: the script, what is known of it, the changes so far, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import libcst as cst

from evenstep.tools.convert.edits import Edits
from evenstep.tools.convert.losses import Losses
from evenstep.tools.convert.source import Node, Script
from evenstep.tools.convert.values import Flow


@dataclass(frozen=True, order=True)
class Remark:
    """Something that a person should know of a line of the script as it was."""

    line: int
    text: str


@dataclass
class Work:
    """One conversion.

    Attributes:
        world: What the script calls evenstep's world.
        launch: The command that starts the script on two ranks.
        problems: Why the script can't be converted; if there are any, it is left as it is.
        notes: What was left, or decided, and why.
        collectives: Expressions that became a call that every rank makes.
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
        """Say why the script can't be converted."""
        remark = Remark(self.script.line(node), text)
        if remark not in self.problems:
            self.problems.append(remark)

    def note(self, node: Node, text: str, *, mark: bool = False) -> None:
        """Say what a person should know; `mark`: above the statement, too."""
        remark = Remark(self.script.line(node), text)
        if remark not in self.notes:
            self.notes.append(remark)
        if mark:
            self.edits.add(self.edits.comments, self.script.statement(node), f"evenstep convert: {text}")

    def remove(self, node: Node) -> None:
        """Leave out a statement, if it has its line for itself."""
        statement = self.script.statement(node)
        if len(getattr(statement, "body", ())) == 1:
            self.edits.removed.add(statement)

    @property
    def total(self) -> str:
        """A number's sum over ranks; {old} is this rank's."""
        return f"sum({self.world}.exchange({{old}}))"

    def unseen(self, call: cst.Call, by_hand: str) -> str | None:
        """What to write by hand where a call gets arguments from `*` or `**`; None if all of them are seen.

        Args:
            call: Whose arguments have to be changed.
            by_hand: The arguments that matter, as one writes them, if they are known.
        """
        hidden = next((argument for argument in call.args if argument.star), None)
        if hidden is None:
            return None
        unpacked, function = f"{hidden.star}{self.script.code(hidden.value)}", self.script.code(call.func)
        text = f"{unpacked} passes arguments to {function} that convert doesn't see: write them out there"
        return f"{text} ({by_hand})" if by_hand else text

    def average(self, node: Node, weight: str) -> None:
        """Have an expression be its mean over ranks."""
        if node not in self.collectives:
            self.collectives[node] = f"{self.world}.mean({{old}}, weight={weight})"

    def add_up(self, node: Node) -> None:
        """Have an expression be its sum over ranks."""
        if node not in self.collectives:
            self.collectives[node] = self.total

    def seeds(self, *, are_numbers: bool) -> list[cst.Call]:
        """Calls of `torch.manual_seed` that are given a number, or something else."""
        calls = [call for call in self.calls() if self.script.qualified(call.func) == "torch.manual_seed" and call.args]
        return [call for call in calls if isinstance(call.args[0].value, cst.Integer) == are_numbers]

    def calls(self) -> list[cst.Call]:
        """All calls of the script, in order."""
        return [node for node in self.script.nodes if isinstance(node, cst.Call)]

    def short(self, call: cst.Call) -> str:
        """The last part of what is called: "step" of `optimizer.step()`."""
        return self.script.code(call.func).rsplit(".", 1)[-1]

    def unused(self, name: str) -> str:
        """A name that the script doesn't use yet; it is taken from now on."""
        taken = self.script.names() | self._given
        found = next(each for number in count(1) if (each := f"{name}_{number}".removesuffix("_1")) not in taken)
        self._given.add(found)
        return found

    _given: set[str] = field(default_factory=set)
