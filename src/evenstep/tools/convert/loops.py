"""The loops of a script: which train and which evaluate, the loaders that they read, and the weight of a batch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from evenstep.tools.convert.edits import Work
from evenstep.tools.convert.losses import CONSTANT, UNKNOWN, Kind
from evenstep.tools.reading.tree import Node
from evenstep.tools.reading.values import PASSING, Values

_SHAPING = {"view", "reshape", "ones", "zeros", "full", "rand", "randn", "randint", "expand", "repeat", "init_hidden"}


@dataclass(frozen=True)
class Pass:
    """A call of `backward`.

    Attributes:
        call: The call node.
        loss: The loss that `backward` is called on, without a scaler around it.
        scaler: The code of the gradient scaler, if there is one.
        weight: An expression for the number that the loss was averaged over.
        kind: Whether the loss is a mean, a sum or something else.
        loops: The loops over loaders whose batches the loss is computed from.
    """

    call: cst.Call
    loss: cst.BaseExpression
    scaler: str | None
    weight: str
    kind: Kind
    loops: frozenset[Node]


class Loops:
    """Finds the training and evaluation loops of a script.

    Attributes:
        passes: The backward passes.
        training: Loops whose batches are trained on.
        evaluating: Other loops over loaders.
        flowing: The expressions that gradients flow through.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._script, self._flow = work.script, work.flow
        self.passes: list[Pass] = []
        for call in work.calls():
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
                self._read_pass(call, call.func.value)
        self.training: set[Node] = {loop for each in self.passes for loop in each.loops}
        self.flowing = {node for each in self.passes for node in work.losses.slice(each.loss, gradients=True)}
        loops = [node for node in self._script.nodes if isinstance(node, cst.For | cst.CompFor)]
        # Batches that a generator yields are judged in the loop over the generator.
        passing = {
            around for node in self._script.nodes if isinstance(node, cst.Yield) for around in self._script.loops(node)
        }
        self.evaluating = [
            loop for loop in loops if loop not in self.training and loop not in passing and self.in_head(loop)
        ]

    # ------------------------------------------------------------------ loaders of loops

    def loaders(self, loop: Node) -> Values:
        """The loaders whose batches a loop reads."""
        return frozenset().union(*(self._flow.loaders(node) for node in self._sources(loop)))

    def _sources(self, loop: Node) -> list[cst.BaseExpression]:
        """The expressions that yield a loop's batches: in its head, or passed to `next` in its body."""
        found = self.in_head(loop) if isinstance(loop, cst.For | cst.CompFor) else []
        if isinstance(loop, cst.For | cst.While) and not found:
            calls = [each for each in self._script.inside(loop.body) if isinstance(each, cst.Call) and each.args]
            taken = [each.args[0].value for each in calls if self._script.code(each.func) == "next"]
            found = [each for each in taken if self._flow.loaders(each)]
        return found

    def in_head(self, loop: cst.For | cst.CompFor) -> list[cst.BaseExpression]:
        """The expressions in a loop's head that yield batches one by one; not within `list`, which keeps batches."""
        found: list[cst.BaseExpression] = []
        waiting: list[cst.BaseExpression] = [loop.iter]
        while waiting:
            node = waiting.pop()
            if self._flow.loaders(node):
                found.append(node)
            if isinstance(node, cst.Call) and self._work.short(node) in PASSING | {"enumerate", "zip"}:
                waiting += [argument.value for argument in node.args]
        return found

    def at(self, node: Node, depth: int = 0) -> frozenset[Node]:
        """The innermost loops over loaders around a node, or around the calls of its function."""
        around = [loop for loop in self._script.loops(node) if self.loaders(loop)]
        if around or depth > 4:
            return frozenset(around[:1])
        function = self._script.function(node)
        calls = self._flow.calls.get(function, ()) if function is not None else ()
        return frozenset().union(*(self.at(call, depth + 1) for call in calls))

    def taken_from(self, node: Node) -> list[Node]:
        """The expressions that yield the batches that a number depends on."""
        found = [site for site in self._work.losses.batches(node) if site is not None]
        return found or [source for loop in self.at(node) for source in self._sources(loop)]

    def num_samples(self, sites: Sequence[Node], at: Node) -> str | None:
        """An expression for the number of samples in the batch that `sites` yield; None if its loader has no name.

        It reads the loader's count, since a tensor's first dimension may be anything.
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

    def _read_pass(self, call: cst.Call, loss: cst.BaseExpression) -> None:
        work, scaler = self._work, None
        match loss:
            case cst.Call(func=cst.Attribute(value=base, attr=cst.Name(value="scale")), args=[scaled]):
                if self._flow.is_a(base, "scaler"):
                    loss, scaler = scaled.value, self._script.code(base)
        loops = self.at(call)
        reason = next(self._why_not(call, loss, loops), None)
        if reason is not None:
            work.refuse(call, reason)
            return
        kind, num_samples = work.losses.kind(loss), self.num_samples(self.taken_from(loss), call)
        self._remark_on(call, loss, kind, loops)
        self.passes.append(Pass(call, loss, scaler, kind.weight or str(num_samples), kind, loops))

    def _why_not(self, call: cst.Call, loss: cst.BaseExpression, loops: frozenset[Node]) -> Iterator[str]:
        """The reasons why a backward pass can't be distributed over ranks."""
        script, losses, text = self._script, self._work.losses, self._script.code(call.func)
        if script.qualified(call.func) == "torch.autograd.backward" or text in ("self.backward", "super().backward"):
            yield f"{text}(...): only loss.backward() is understood"
        if any(argument.keyword is None for argument in call.args):
            yield "backward() is given a gradient: the loss has to be one number"
        for loop in script.loops(call) if loops else ():
            if loop in loops:
                break
            head = loop.iter if isinstance(loop, cst.For) else loop.test
            if losses.varies(head) and not re.search(r"\.(size\(|shape\[)[-1-9]", script.code(head)):  # over time
                yield (
                    "this loop cuts its batch into parts, and ranks would have different numbers of them: train on "
                    "whole batches, or use model.microbatches"
                )
        for shaped in filter(None, map(self.counts_on_size, loops)):
            yield (
                f"{shaped} expects a whole batch, and a rank has fewer samples: take their number from the batch, as "
                f"x.size(0)"
            )
        if not loops:
            yield (
                "no torch DataLoader of this file gives this loss its batches, and convert reads this file alone: make "
                "the DataLoader here, and loop over it"
            )
        if losses.compares_pairs(loss):
            yield (
                "each sample is compared with all others of its batch, and a rank has fewer of them: gather the "
                'features of all ranks first, as the page "Losses over all ranks\' samples" shows'
            )
        if self.num_samples(self.taken_from(loss), call) is None:
            text = "the loader of this batch has no name here, and its num_samples is the weight of the loss"
            yield f"{text}: loop over one DataLoader that has a name, or pass it to the function"

    def _remark_on(self, call: cst.Call, loss: Node, kind: Kind, loops: frozenset[Node]) -> None:
        """Remark on code that may make a loss differ on a part of a batch."""
        work, losses = self._work, self._work.losses
        if kind.name in (UNKNOWN, CONSTANT):
            text = "the loss is taken to be the mean over the batch's samples: evenstep verify shows whether it is"
            work.note(call, text, mark=True)
        own = losses.slice(loss)
        for node in losses.statistics(loss):
            hint = "" if node in own else ", if it is over samples"  # a model may have another dimension first
            text = f"each rank computes this statistic inside the loss from its own part of the batch{hint}"
            work.note(node, text, mark=True)
        nodes = sorted(losses.slice(loss, gradients=True), key=self._script.order)
        squeezed = next((each for each in nodes if self._script.code(each).endswith(".squeeze()")), None)
        if squeezed is not None:
            text = "squeeze() removes the dimension of samples, too, where a rank has one sample: write squeeze(1)"
            work.note(squeezed, text)
        calls = [value.site for loop in loops for value in self.loaders(loop) if isinstance(value.site, cst.Call)]
        if kind.weight is None and any(work.given(each, "collate_fn") for each in calls):
            text = "the loss is weighted by the number of samples: if samples have different lengths, weight it by"
            work.note(call, f"{text} the number that it is averaged over")

    def counts_on_size(self, loop: Node) -> str | None:
        """The code of a call that makes or shapes a tensor with the loader's batch size; None if there is none.

        A rank has fewer samples than that.
        """
        script = self._script
        calls = [value.site for value in self.loaders(loop) if isinstance(value.site, cst.Call)]
        sizes = {script.code(size) for each in calls for size in self._work.given(each, "batch_size")}
        for node in script.inside(loop):
            if isinstance(node, cst.Call) and self._work.short(node) in _SHAPING:
                inner = [part for argument in node.args for part in script.inside(argument.value)]
                parts = [script.code(part) for part in inner if not self._work.losses.varies(part)]
                first = script.code(node.args[0]).lstrip("([").split(",")[0] if node.args else ""
                if sizes & {part for part in (*parts, first) if not part.isdigit() or part == first}:
                    return script.code(node)
        return None
