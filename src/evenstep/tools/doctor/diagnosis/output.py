"""Rules about output: what every rank prints, logs and writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import (
    assignments_to,
    found,
    has_argument_of_rank,
    in_training_or_evaluation,
    is_true,
    names_in,
    on_all_ranks,
    origins,
    walk,
    wrappers_at,
)
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Call, Frame, dotted, text_of
from evenstep.tools.reading.values import Thing

_BARS = re.compile(r"tqdm(?:\.\w+)*\.(?:tqdm|trange|tqdm_notebook)|rich\.progress\.track")
_TRACKERS: tuple[str, ...] = (
    "wandb.init",
    "mlflow.start_run",
    "neptune.init_run",
    "torch.utils.tensorboard.SummaryWriter",
)
_TRACKERS += ("tensorboardX.SummaryWriter", "comet_ml.Experiment", "comet_ml.start", "clearml.Task.init", "aim.Run")
_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model", ".save_pretrained")
_WRITERS = (".savefig", ".to_csv", ".write_text", ".write_bytes", "numpy.save", "numpy.savez", ".save_image")


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    if script.is_distributed:
        yield from _printing(script)
        yield from _bars(script)
        yield from _trackers(script)
        yield from _checkpoints(script)
        yield from _files(script)
        yield from _wrapped_state(script)
    yield from _incomplete_state(script)


def _printing(script: Script) -> Iterator[Finding]:
    if _prints_otherwise(script):
        return
    logs = _logs_on_all_ranks(script)
    for call in script.calls:
        is_print = call.name == "print" or (_BARS.fullmatch(call.name.removesuffix(".write")) and call.last == "write")
        is_log = logs and call.last in ("info", "warning", "debug") and _is_logger(call)
        if not (is_print or is_log) or call.name.startswith("torch.distributed"):
            continue
        if any(each.keyword is not None and each.keyword.value == "file" for each in call.node.args):
            continue
        if has_argument_of_rank(script, call) or not on_all_ranks(script, call):
            continue
        if in_training_or_evaluation(script, call):
            yield found("EV201", call, f"{call.text} runs on every rank")


def _prints_otherwise(script: Script) -> bool:
    """True if `print` isn't python's: replaced in a function that somebody calls, or at the top level."""
    own = (file.functions.get("print") for file in script.files)
    if script.named(".setup_for_distributed") or any(each and each.frame.kind == "module" for each in own):
        return True
    if any("print" in file.imports for file in script.files):
        return True
    replaced = [
        each.frame.function
        for file in script.files
        for each in file.assignments
        if dotted(each.target) in ("print", "builtins.print", "__builtin__.print", "__builtins__.print", "sys.stdout")
    ]
    return any(
        each is None or each in script.values.passed or bool(script.values.called_from.get(each)) for each in replaced
    )


def _logs_on_all_ranks(script: Script) -> bool:
    """True if logging was set up to show INFO, on whatever rank."""
    if script.named("accelerate.logging.get_logger"):
        return False
    for call in script.named("logging.basicConfig"):
        level = text_of(call.argument("level"))
        if (
            level.rpartition(".")[2] in ("INFO", "DEBUG", "'INFO'", '"INFO"')
            and on_all_ranks(script, call)
            and not has_argument_of_rank(script, call)
        ):
            levels = script.named(".setLevel", ".disable", ".addFilter")
            return not any(has_argument_of_rank(script, each) or not on_all_ranks(script, each) for each in levels)
    return False


def _is_logger(call: Call) -> bool:
    return call.name.startswith("logging.") or bool(
        re.fullmatch(r"(?i)_?(?:\w+\.)*_?(?:logger|log)", dotted(call.receiver))
    )


def _bars(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        if not _BARS.fullmatch(call.name) or call.has_star or call.argument("disable") is not None:
            continue
        if not has_argument_of_rank(script, call) and on_all_ranks(script, call) and _is_in_training(script, call):
            disabled = (
                "disable=not accelerator.is_local_main_process" if script.uses_accelerate else "disable=rank != 0"
            )
            yield found(
                "EV202", call, f"{call.text} runs on every rank", mend=f"{dotted(call.node.func)}(..., {disabled})"
            )


def _is_in_training(script: Script, call: Call) -> bool:
    if in_training_or_evaluation(script, call):
        return True
    return any(  # the bar is what a loop goes through
        call.frame.function is loop.frame.function and loop in script.training_loops + script.evaluation_loops
        for loop in script.loops
    )


def _trackers(script: Script) -> Iterator[Finding]:
    for call in script.named(*_TRACKERS):
        arguments = " ".join(
            text_of(each) for argument in call.arguments for each, _ in origins(script, argument, call.frame, depth=2)
        )
        if call.argument("mode") is not None or call.argument("group") is not None or call.has_star:
            continue
        if re.search(r"(?i)rank|is_main|is_master|process_index", arguments) or not on_all_ranks(script, call):
            continue
        yield found("EV203", call, f"{call.text} runs on every rank")


def _saves(script: Script) -> list[Call]:
    return [
        call
        for call in script.named(*_SAVERS)
        if call.frame.function is None or call.frame.function.name != "state_dict"
    ]


def _with_what(script: Script, saves: list[Call]) -> Iterator[Call]:
    """The calls that say what is saved: instead of `torch.save(*args)` in a helper those of the helper."""
    for save in saves:
        function = save.frame.function
        if function is not None and any(each.star == "*" for each in save.node.args):
            yield from script.values.called_from.get(function, [])
        else:
            yield save


def _path_speaks_of_ranks(script: Script, node: cst.CSTNode | None, call: Call) -> bool:
    texts = (text_of(each) for each, _ in origins(script, node, call.frame))
    return any(
        re.search(
            r"(?i)rank|process_index|\bgpu\b|worker|lock|getpid|uuid|tempfile|mkdtemp|devnull|proc_id|BytesIO", each
        )
        for each in texts
    )


def _checkpoints(script: Script) -> Iterator[Finding]:
    for call in _saves(script):
        once_a_node = _runs_once_a_node(script, call.frame)
        if has_argument_of_rank(script, call) or not (on_all_ranks(script, call) or once_a_node):
            continue
        path = call.argument("f", 1) if call.last in ("save", "save_file", "save_model") else call.positional(0)
        if _path_speaks_of_ranks(script, path, call):
            continue
        mend = ""
        if script.uses_accelerate:
            mend = "accelerator.wait_for_everyone()\nif accelerator.is_main_process:\n    torch.save(state, path)"
        elif script.uses_fabric:
            mend = "fabric.save(path, state)  # on every rank: rank 0 writes"
        where = "one rank of every node" if once_a_node else "every rank"
        yield found("EV204", call, f"{call.text} runs on {where}, and writes the same file", mend=mend)


def _runs_once_a_node(script: Script, frame: Frame, depth: int = 3) -> bool:
    """True under `local_rank == 0` and no condition on the global rank, here or around all calls of the function."""
    if script.starts_ranks:
        return False  # those of one node
    tests = [each for each in frame.outwards() if each.kind == "if" and each.holds]
    kinds = [script.values.kinds(inner, each) for each in tests for inner in walk(each.test)]
    if any("main" in each and "local main" not in each for each in kinds):
        return False
    if any("local main" in each for each in kinds):
        return True
    sites = script.values.called_from.get(frame.function, []) if frame.function is not None and depth else []
    return bool(sites) and all(_runs_once_a_node(script, site.frame, depth - 1) for site in sites)


def _files(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        is_open = call.name == "open" or (call.last == "open" and call.receiver is not None and call.name != "os.open")
        if is_open:
            mode = call.argument("mode", 1 if call.name == "open" else 0)
            if not re.fullmatch(r"[\"'](?:[wax]\+?[bt]?\+?|[wax][bt]\+?)[\"']", text_of(mode)):
                continue
            path: cst.CSTNode | None = call.argument("file", 0) if call.name == "open" else call.receiver
            if call.name != "open" and re.match(r"(?:gzip|lzma|tarfile|zipfile|bz2|wave|Image)\.", call.name):
                path = call.positional(0)
        elif _is_writer(call):
            path = call.receiver if call.last in ("write_text", "write_bytes") else call.positional(0)
        elif call.name.startswith("torchvision.datasets.") and is_true(call.argument("download")):
            if on_all_ranks(script, call) and not _is_done_before(script, call):
                yield found(
                    "EV205",
                    call,
                    f"{call.text} downloads on every rank at the same time",
                    mend=f"if rank == 0:\n    {dotted(call.node.func)}(root, download=True)\ndist.barrier()",
                )
            continue
        else:
            continue
        # Written beside and renamed, a file is whole whichever rank comes last.
        renames = any(
            each.name in ("os.replace", "os.rename", "shutil.move") and each.frame.function is call.frame.function
            for each in call.frame.file.calls
        )
        if renames or not on_all_ranks(script, call) or _path_speaks_of_ranks(script, path, call):
            continue
        if call.frame.file is script.files[0] or _is_written_out(script, path, call):
            yield found("EV205", call, f"{call.text} writes the same file on every rank")


def _is_written_out(script: Script, path: cst.CSTNode | None, call: Call) -> bool:
    """True of a path that is a string. What else a module of helpers writes may differ between ranks."""
    return any(isinstance(each, cst.SimpleString) for each, _ in origins(script, path, call.frame, depth=2))


def _is_writer(call: Call) -> bool:
    return f".{call.last}" in _WRITERS or call.name in _WRITERS


def _is_done_before(script: Script, download: Call) -> bool:
    """True if another call of the same data set is guarded, so that this one finds the files."""
    return any(
        call is not download and call.name == download.name and script.perhaps_some_ranks_only(call.frame)
        for call in script.calls
    )


def _wrapped_state(script: Script) -> Iterator[Finding]:
    if re.search(r"consume_prefix_in_state_dict|[\"']module\.[\"']", script.code):
        return
    seen: set[Call] = set()
    for save in _with_what(script, _saves(script)):
        for state in _states(script.things(save.argument("obj", 0), save.frame)):
            site = state.site
            if site is None or site in seen or not state.inner:
                continue
            wrappers = wrappers_at(script, site.receiver, site.frame, site.line)
            makers = {each.site.name for each in wrappers if each.site is not None}
            fabrics = [
                each for each in wrappers if each.site is not None and "fabric" in script.receiver_kinds(each.site)
            ]
            if wrappers and not fabrics and not any("FullySharded" in name for name in makers):
                seen.add(site)
                receiver = text_of(site.receiver)
                inner = f"accelerator.unwrap_model({receiver})" if script.uses_accelerate else f"{receiver}.module"
                yield found(
                    "EV206",
                    site,
                    f"{receiver} is the wrapper, so that every name in the file begins with `module.`",
                    mend=f"torch.save({inner}.state_dict(), path)",
                )


def _states(things: frozenset[Thing]) -> Iterator[Thing]:
    for each in things:
        if each.kind == "state":
            yield each
        for item in each.items:
            yield from _states(item)


def _incomplete_state(script: Script) -> Iterator[Finding]:
    if not script.named(".load_state_dict"):
        return
    schedulers = [
        call for call in script.calls if "scheduler" in script.kinds_made(call) and call.name.rpartition(".")[0]
    ]
    scalers = script.named(".GradScaler") if script.named(".scale") else []  # made, and used
    told: set[int] = set()  # one state may be saved in two places
    for save in _with_what(script, script.named("torch.save")):
        state = save.argument("obj", 0)
        dictionaries = [each for each, _ in origins(script, state, save.frame, depth=2) if isinstance(each, cst.Dict)]
        text = " ".join(text_of(each) for each in dictionaries)
        for name in names_in(state) if isinstance(state, cst.Name | cst.Attribute) else ():
            text += " ".join(
                text_of(each.target) + text_of(each.value)
                for each in save.frame.file.assignments
                if isinstance(each.target, cst.Subscript) and dotted(each.target) == name
            )
            if not assignments_to(script, name, save.frame) and not dictionaries:
                text = ""
        if not dictionaries or not re.search(r"(?i)optim\w*[^,]*state_dict|opt\w*\.state_dict", text) or "**" in text:
            continue
        missing = []
        if schedulers and not re.search(r"(?i)sched", text):
            missing.append("the scheduler")
        if scalers and not re.search(r"(?i)scaler", text):
            missing.append("the gradient scaler")
        if not re.search(r"(?i)epoch|step|iter|position|progress", text):
            missing.append("the epoch or step")
        if missing and not told & {id(each) for each in dictionaries}:
            told |= {id(each) for each in dictionaries}
            yield found("EV207", save, f"the checkpoint has the optimizer, and lacks {' and '.join(missing)}")
