"""Rules about collectives: every rank calls the same ones, and no more than it takes."""

from __future__ import annotations

from collections.abc import Iterator

from evenstep.doctor.diagnosis.asking import found, is_nothing, per_step, wrappers_at
from evenstep.doctor.findings import Finding
from evenstep.doctor.reading.contexts import Script
from evenstep.doctor.reading.program import Call, Frame, shortened, text_of

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
        if wrapped:
            yield call
