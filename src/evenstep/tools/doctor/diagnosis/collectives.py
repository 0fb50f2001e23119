"""Rules about collectives: every rank calls the same ones, and no more than it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import (
    assignments_to,
    found,
    heading,
    is_nothing,
    names_in,
    per_step,
    runs,
    walk,
    wrappers_at,
)
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Call, Frame, Function, Loop, dotted, leaves, shortened, text_of
from evenstep.tools.reading.values import Thing

_OF_TORCH = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
_METHODS = {
    "accelerator": {
        "gather",
        "gather_for_metrics",
        "pad_across_processes",
        "reduce",
        "save_state",
        "wait_for_everyone",
    },
    "fabric": {"all_gather", "all_reduce", "barrier", "broadcast", "save"},
    "world": {"barrier", "broadcast_object", "exchange", "gather", "mean"},
}
_SHARES = re.compile(r"(?i)reduce|gather|sync|broadcast|average")
_NO_GRAD = re.compile(r"\b(?:no_grad|inference_mode)\b")
_BARRIERS = {"barrier", "monitored_barrier", "wait_for_everyone"}


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    if not script.is_distributed:
        return
    collectives = [call for call in script.calls if _is_collective(script, call)]
    yield from _on_some_ranks(script, collectives)
    for call in collectives:
        if call.last in _BARRIERS and per_step(script, call):
            yield found("EV403", call, f"{call.text} in every step")
    yield from _model_on_some_ranks(script)
    yield from _steps_left_out(script, collectives)
    yield from _stops_alone(script, collectives)


def _ifs_that_leave(script: Script, loop: Loop) -> Iterator[tuple[Frame, str]]:
    """The `if`s of a loop's own body that go to its next round or out of it, with the texts of their bodies."""
    for file in script.files:
        for each in file.ifs:
            if isinstance(each.node, cst.If) and leaves(each.node.body) and loop.frame in each.outwards():
                text = text_of(each.node.body)
                if not re.search(r"\braise\b|exit\(", text):
                    yield each, text


def _steps_left_out(script: Script, collectives: list[Call]) -> Iterator[Finding]:
    """`if torch.isnan(loss): continue` before the backward pass, which the other ranks make."""
    for loop in script.step_loops:
        passes = [each for each in script.backward_calls if loop in script.loops_around(each.frame)]
        if not any("wrapped" in script.kinds_made(call) for call in script.calls):
            return
        for each, _ in _ifs_that_leave(script, loop):
            tested = [inner for inner in walk(each.test) if isinstance(inner, cst.Call)]
            asks = any(_last(inner) in ("isnan", "isinf", "isfinite") for inner in tested)
            is_before = any(one.frame.function is each.function and one.line > each.line for one in passes)
            if asks and is_before and not _is_shared(script, each, collectives):
                yield found(
                    "EV402",
                    (each.file, each.line),
                    f"a rank where `{shortened(text_of(each.test), 60)}` holds leaves the backward pass out, and the "
                    f"others wait in theirs",
                    mend="loss = torch.nan_to_num(loss)  # or all_reduce the flag, and skip on every rank",
                )


def _last(call: cst.Call) -> str:
    return dotted(call.func).rpartition(".")[2] or (
        call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    )


def _stops_alone(script: Script, collectives: list[Call]) -> Iterator[Finding]:
    """A `break` for what a rank has measured on its own part of the validation data."""
    if any(map(script.imports, ("torchmetrics", "ignite", "evaluate"))):
        return  # whose numbers are those of all ranks
    measures = {
        loop.frame.function
        for loop in script.evaluation_loops
        if loop.frame.function is not None and any(_is_divided(script, each) for each in script.loaders_of(loop))
    }
    for loop in script.training_loops:
        for each, body in _ifs_that_leave(script, loop):
            if (
                "continue" not in body
                and loop not in script.step_loops
                and _is_measured(script, each, measures, collectives)
            ):
                yield found(
                    "EV402",
                    (each.file, each.line),
                    f"`{shortened(text_of(each.test), 60)}` rests on this rank's part of the validation data, so that "
                    f"one rank may stop while others go on",
                    mend="dist.all_reduce(val_loss)  # before it is compared: ranks then decide alike",
                )
                return


def _is_divided(script: Script, loader: Thing) -> bool:
    site = loader.site
    return site is not None and (
        site in script.values.prepared
        or "sampler"
        in script.values.kinds(site.argument("sampler", 3) or site.argument("batch_sampler", 4), site.frame)
    )


def _behind(script: Script, test: Frame) -> Iterator[tuple[cst.CSTNode, Frame]]:
    """What a condition's names are given, and the conditions under which they are given it."""
    pending: list[tuple[cst.CSTNode | None, Frame, int]] = [(test.test, test, 4)]
    seen: set[int] = set()
    while pending:
        node, frame, left = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node, frame
        for name in names_in(node) if left else ():
            for each in assignments_to(script, name, frame):
                pending.append((each.value, each.frame, left - 1))
                pending += [(around.test, around, left - 1) for around in each.frame.outwards() if around.kind == "if"]


def _calls_behind(script: Script, test: Frame) -> list[Call]:
    inside = [inner for node, _ in _behind(script, test) for inner in walk(node) if isinstance(inner, cst.Call)]
    return [call for inner in inside if (call := script.values.record(inner)) is not None]


def _is_shared(script: Script, test: Frame, collectives: list[Call]) -> bool:
    """True if ranks have exchanged what a condition rests on, as far as names and the calls behind them tell."""
    shared = {name for call in collectives for argument in call.arguments for name in names_in(argument)}
    if any(names_in(node) & shared for node, _ in _behind(script, test)):
        return True
    return runs(
        script, _calls_behind(script, test), lambda call: call in collectives or bool(_SHARES.search(call.last))
    )


def _is_measured(script: Script, test: Frame, functions: set[Function], collectives: list[Call]) -> bool:
    """True if a condition rests on what functions return, and ranks exchange nothing of it."""
    targets = {target for call in _calls_behind(script, test) for target in script.values.functions_of(call)}
    return bool(targets & functions) and not _is_shared(script, test, collectives)


def _is_collective(script: Script, call: Call) -> bool:
    if call.name.startswith("torch.distributed."):
        return call.last in _OF_TORCH and not _has_group(call)
    return any(call.last in _METHODS.get(kind, ()) for kind in script.receiver_kinds(call))


def _has_group(call: Call) -> bool:
    """True if a call is one of a sub-group, whose ranks are perhaps those that come by."""
    first = 0 if call.last in ("barrier", "monitored_barrier") else 2
    others = [call.positional(index) for index in range(first, 5)]
    return not is_nothing(call.argument("group")) or any("group" in text_of(each) for each in others)


def _on_some_ranks(script: Script, collectives: list[Call]) -> Iterator[Finding]:
    guarded = [call for call in collectives if script.perhaps_some_ranks_only(call.frame)]
    for call in guarded:
        # `if rank == 0: broadcast(x) else: broadcast(y)`, and barriers that let rank 0 go first: both sides call.
        if not script.some_ranks_only(call.frame) or _is_called_elsewhere(
            script, call, [each for each in guarded if each.last == call.last]
        ):
            continue
        yield found("EV401", call, f"{call.text} is called {_where(script, call)}")


def _is_called_elsewhere(script: Script, call: Call, alike: list[Call]) -> bool:
    """True if the same function has such a call under another condition, or in the other branch of this one."""
    places = {_condition(script, each) for each in alike if each.frame.function is call.frame.function}
    return len(places) > 1


def _condition(script: Script, call: Call) -> tuple[str, bool]:
    frame = script.condition_of(call.frame) or next((each for each in call.frame.outwards() if each.kind == "if"), None)
    return ("", True) if frame is None else (text_of(frame.test), frame.holds)


def _where(script: Script, call: Call) -> str:
    frame: Frame | None = script.condition_of(call.frame)
    if frame is None:
        function = call.frame.function
        return f"in {function.name}, which some ranks call only" if function else "on some ranks only"
    condition = shortened(text_of(frame.test), 60)
    return f"where `{condition}` {'holds' if frame.holds else 'does not hold'}, on some ranks only"


def _model_on_some_ranks(script: Script) -> Iterator[Finding]:
    found_calls = list(_wrapped_calls(script))
    for call in found_calls:
        callee = call.receiver if call.last == "forward" and call.receiver is not None else call.node.func
        if _is_called_elsewhere(script, call, [each for each in found_calls if each.name == call.name]):
            continue
        yield found(
            "EV404",
            call,
            f"{call.text} runs the wrapped model {_where(script, call)}",
            mend=f"{text_of(callee)}.module(...)  # the model itself, or evaluate on every rank",
        )


def _wrapped_calls(script: Script) -> Iterator[Call]:
    """The forward passes of wrapped models that surely run on some ranks only."""
    for call in script.calls:
        callee = call.receiver if call.last == "forward" and call.receiver is not None else call.node.func
        if not call.node.args or not script.some_ranks_only(call.frame):
            continue
        wrapped = [each for each in wrappers_at(script, callee, call.frame, call.line) if each.kind == "wrapped"]
        if wrapped and (_has_buffers(script, wrapped) or not _is_without_gradients(script, call.frame)):
            yield call


def _has_buffers(script: Script, wrapped: list[Thing]) -> bool:
    """True if a model has buffers, which torch's wrapper broadcasts in each forward pass, or comes from elsewhere."""
    models = [inner for each in wrapped for inner in each.inner]
    if not all(each.cls is not None or each.site is None or each.site.name.startswith("torch.nn.") for each in models):
        return True
    made = [call for call in script.calls if re.match(r"(?:Lazy)?BatchNorm\d|register_buffer", call.last)]
    return not models or any(all(each.kind != "if" for each in call.frame.outwards()) for call in made)


def _is_without_gradients(script: Script, frame: Frame, depth: int = 4) -> bool:
    """True under `torch.no_grad()` or `torch.inference_mode()`, here or around all calls of the function."""
    function = frame.function
    if any(each.kind == "with" and _NO_GRAD.search(heading(each)) for each in frame.outwards()):
        return True
    if function is None or not depth:
        return False
    sites = script.values.called_from.get(function, [])
    return any(_NO_GRAD.search(each) for each in function.decorators) or (
        bool(sites) and all(_is_without_gradients(script, site.frame, depth - 1) for site in sites)
    )
