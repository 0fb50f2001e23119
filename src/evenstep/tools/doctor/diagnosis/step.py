"""Rules about the step: accumulation, clipping, the optimizer, the loss, schedules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import (
    WORLD,
    assignments_to,
    exclude_each_other,
    found,
    has_wrapped,
    is_nothing,
    models_of,
    names_in,
    number,
    origins,
    walk,
)
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Assignment, Call, Frame, Loop, dotted, shortened, text_of

# Up to this global batch Goyal et al., "Accurate, Large Minibatch SGD" (2017), leave the learning rate as it is.
REFERENCE_BATCH = 256
FEW_ROWS = 8  # batch normalisation over at most so many rows of a rank is noise
_SAVES_EXCHANGE = (
    "no_sync",
    "accumulate",
    "no_backward_sync",
    "require_backward_grad_sync",
    "set_requires_gradient_sync",
    "microbatches",
)


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    if script.is_distributed:
        yield from _accumulation(script)
        yield from _divided_by_world(script)
        yield from _tokens(script)
        yield from _learning_rate(script)
        yield from _batch_norm(script)
        yield from _schedulers(script)
        yield from _around_the_wrapper(script)
        yield from _around_the_scale(script)
    yield from _replaced_parameters(script)
    yield from _clipping(script)


def _accumulating(script: Script) -> Iterator[tuple[Call, str]]:
    """(backward call, number of micro-batches) where several passes make a step."""
    for step in script.step_calls:
        around = script.loops_around(step.frame)
        if not around:
            continue
        loop = around[0]
        conditions = script.conditions_until(step.frame, loop) or []
        counts = [count for each in conditions if (count := _every(script, each.test, each, each.holds))]
        for backward in script.backward_calls:
            inner = script.loops_around(backward.frame)
            if counts and inner and inner[0] is loop and script.in_every_round(backward.frame, loop):
                yield backward, counts[0]
            elif len(inner) > 1 and inner[1] is loop and inner[0].iterates is not None and not counts:
                count = _round_count(inner[0])
                if count and script.in_every_round(backward.frame, inner[0]):
                    yield backward, count


def _every(script: Script, test: cst.CSTNode | None, frame: Frame, holds: bool, depth: int = 2) -> str:
    """The `n` of a condition that has the value `holds` in every n-th round: of `(i + 1) % n == 0`, or its name."""
    match test:
        case cst.UnaryOperation() if isinstance(test.operator, cst.Not):
            return _every(script, test.expression, frame, not holds, depth)
        case cst.BooleanOperation():
            return _every(script, test.left, frame, holds, depth) or _every(script, test.right, frame, holds, depth)
        case cst.BinaryOperation() if isinstance(test.operator, cst.Modulo) and not holds:
            return text_of(test.right)
        case cst.Comparison(left=cst.BinaryOperation() as left) if isinstance(left.operator, cst.Modulo):
            is_equal = isinstance(test.comparisons[0].operator, cst.Equal)
            is_other = isinstance(test.comparisons[0].operator, cst.NotEqual)
            return text_of(left.right) if (is_equal and holds) or (is_other and not holds) else ""
        case cst.Name() | cst.Attribute() if depth:
            values = [each for each in assignments_to(script, dotted(test), frame) if each.operator == "="]
            if len(values) == 1:  # one that is set in several places may mean anything
                return _every(script, values[0].value, values[0].frame, holds, depth - 1)
    return ""


def _round_count(loop: Loop) -> str:
    """The `n` of `for _ in range(n)`, unless it is a loop over epochs or steps."""
    node = loop.iterates
    if isinstance(node, cst.Call) and dotted(node.func) == "range" and len(node.args) == 1:
        text = text_of(node.args[0].value)
        if re.search(r"(?i)accum|micro", text):
            return text
    return ""


def _accumulation(script: Script) -> Iterator[Finding]:
    seen: set[Call] = set()
    for backward, count in _accumulating(script):
        if backward in seen:
            continue
        seen.add(backward)
        if not script.uses(*_SAVES_EXCHANGE) and has_wrapped(script):
            mend = ""
            if script.uses_accelerate:
                mend = (
                    "accelerator = Accelerator(gradient_accumulation_steps=4)\nwith accelerator.accumulate(model): ..."
                )
            elif script.uses_fabric:
                mend = "with fabric.no_backward_sync(model, enabled=not last_microbatch): ..."
            yield found(
                "EV501",
                backward,
                f"{backward.text} averages over ranks {shortened(count, 30)} times a step",
                cost="the exchange of gradients, as many times as there are micro-batches",
                mend=mend,
            )
        if backward.argument("weight") is None and not script.uses_evenstep:
            yield from _divisor(script, backward, count)
    if script.uses_accelerate:
        yield from _divided_twice(script)


def _divisor(script: Script, backward: Call, count: str) -> Iterator[Finding]:
    divisors = list(_divisors_of(script, backward))
    last = re.escape(count.rpartition(".")[2])
    if not divisors:
        sums = any(text_of(call.argument("reduction"))[1:-1] == "sum" for call in script.calls)
        accumulates = any("accelerator" in script.receiver_kinds(call) for call in script.named(".accumulate"))
        if not sums and not accumulates and not re.search(rf"/=?\s*\(?(?:\w+\.)*{last}\b|/ len\(micro", script.code):
            yield found(
                "EV502",
                backward,
                f"gradients of {count} backward passes are added, and the loss isn't divided by {count}",
                mend=f"loss = loss / {count}",
            )
        return
    for divisor in divisors:
        if divisor == count or (count in divisor and not WORLD.search(divisor)):
            continue
        is_size = re.fullmatch(r"len\(.*\)|(?:\w+\.)*(?:\w*batch_size|num_batches|n_batches|epochs)", divisor)
        if (divisor.isdecimal() and count.isdecimal()) or is_size:
            yield found(
                "EV502",
                backward,
                f"the loss is divided by {divisor}, and gradients of {count} backward passes are added",
                mend=f"loss = loss / {count}",
            )


def _divisors_of(script: Script, backward: Call, *, inside: bool = False) -> Iterator[str]:
    """What the loss of a backward call is divided by before it.

    Args:
        script: Which.
        backward: The call.
        inside: Also by the script's own functions that have computed it.
    """
    loss = backward.positional(0) if script.receiver_kinds(backward) & {"accelerator", "fabric", "wrapped"} else None
    loss = loss if loss is not None else backward.receiver
    loss = loss.args[0].value if _is_scaling(loss) and isinstance(loss, cst.Call) else loss
    pending = [] if loss is None else [(loss, backward.frame, backward.line)]
    seen: set[int] = set()
    while pending:
        node, frame, line = pending.pop()
        while isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide | cst.Multiply):
            if isinstance(node.operator, cst.Divide):
                yield text_of(node.right)
            node = node.left
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, cst.Name):
            for each in assignments_to(script, node.value, frame):
                if each.operator == "/=" and each.line <= line:
                    yield text_of(each.value)
                elif each.operator == "=" and each.line <= line:
                    pending.append((each.value, each.frame, each.line))
        elif inside and isinstance(node, cst.Call) and (call := script.values.record(node)) is not None:
            for target in script.values.functions_of(call):
                whole = Frame("function", None, target.file, target)
                pending += [(value, whole, sys.maxsize) for value in target.returns]


def _is_scaling(node: cst.CSTNode | None) -> bool:
    """True of `scaler.scale(loss)`."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "scale"


def _divided_twice(script: Script) -> Iterator[Finding]:
    """accelerate's backward divides by `gradient_accumulation_steps` itself."""
    for maker in script.named("accelerate.Accelerator"):
        count = maker.argument("gradient_accumulation_steps")
        if count is None:
            continue
        text = text_of(count)
        for backward in script.backward_calls:
            if "accelerator" not in script.receiver_kinds(backward):
                continue
            for divisor in _divisors_of(script, backward):
                if divisor == text or "gradient_accumulation_steps" in divisor:
                    yield found(
                        "EV502",
                        backward,
                        f"the loss is divided by {divisor}, and once more by accelerator.backward",
                        mend="accelerator.backward(loss)",
                    )


def _divided_by_world(script: Script) -> Iterator[Finding]:
    if not has_wrapped(script) or script.uses("register_comm_hook"):
        return
    for backward in script.backward_calls:
        for divisor in _divisors_of(script, backward, inside=True):
            if WORLD.search(divisor) and "tokens" not in divisor:
                yield found(
                    "EV502",
                    backward,
                    f"the loss is divided by {divisor}, and DDP averages gradients over ranks itself",
                    mend="loss.backward()",
                )
                break


def _clipping(script: Script) -> Iterator[Finding]:
    clips = script.named("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_")
    scalers = [call for call in script.named(".GradScaler") if text_of(call.argument("enabled")) != "False"]
    unscales = script.named(".unscale_", ".unscale_gradients")
    for clip in clips:
        before = [
            each
            for each in script.backward_calls
            if each.frame.function is clip.frame.function
            and each.line < clip.line
            and not exclude_each_other(each.frame, clip.frame)
        ]
        if not script.loops_around(clip.frame) and clip.frame.function is None:
            continue
        if scalers and before and not any(_is_scaling(each.receiver) for each in before):
            continue  # of passes without the scaler
        if scalers:
            same = [each for each in unscales if each.frame.function is clip.frame.function]
            if not unscales or (same and all(each.line > clip.line for each in same)):
                yield found("EV503", clip, f"{clip.text} clips gradients that are multiplied by the loss scale")
        elif not unscales:
            for maker in script.named("accelerate.Accelerator"):
                if text_of(maker.argument("mixed_precision")).strip("\"'") == "fp16":
                    yield found(
                        "EV503",
                        clip,
                        f"{clip.text} clips gradients that accelerate has multiplied by its loss scale",
                        mend="accelerator.clip_grad_norm_(model.parameters(), 1.0)",
                    )


def _replaced_parameters(script: Script) -> Iterator[Finding]:
    optimizers = [
        call for call in script.calls if "optimizer" in script.kinds_made(call) and call.name[:11] == "torch.optim"
    ]
    for optimizer in optimizers:
        for model in models_of(optimizer):
            later = [
                each for each in optimizers if each is not optimizer and f"{model}.parameters" in text_of(each.node)
            ]
            for each in optimizer.frame.file.assignments:
                target = dotted(each.target)
                if (
                    each.frame.function is not optimizer.frame.function
                    or each.line <= optimizer.line
                    or each.operator != "="
                    or any(one.line > each.line for one in later)
                    or not isinstance(each.value, cst.Call)
                ):
                    continue
                made = script.things(each.value, each.frame)
                replaces = target == model or (
                    target.startswith(f"{model}.") and {one.kind for one in made} == {"model"}
                )
                kinds = {one.kind for one in made}
                fresh = kinds == {"model"} and not {one.site for one in made} & _sites(script, model, optimizer)
                is_new = replaces and fresh and model not in names_in(each.value)
                if is_new or (target == model and _shards_anew(script, each)):
                    yield found(
                        "EV504",
                        (each.frame.file, each.line),
                        f"{text_of(each.target)} is replaced after line {optimizer.line} has built the optimizer of "
                        f"{model}'s parameters",
                    )
                    break


def _sites(script: Script, model: str, optimizer: Call) -> set[Call | None]:
    """Where the model was made that an optimizer was built of."""
    before = [each for each in assignments_to(script, model, optimizer.frame) if each.line < optimizer.line]
    return {one.site for each in before for one in script.things(each.value, each.frame)}


def _shards_anew(script: Script, assignment: Assignment) -> bool:
    """True of FSDP that puts flat parameters in the place of a model's own."""
    value = assignment.value
    if not isinstance(value, cst.Call):
        return False
    name = assignment.frame.file.resolve(dotted(value.func))
    flags = " ".join(text_of(each) for each in value.args)
    return name.endswith("FullyShardedDataParallel") and "use_orig_params=True" not in flags


def _in_training(script: Script, call: Call) -> bool:
    return any(loop in script.training_loops for loop in script.loops_around(call.frame))


def _is_filled_in(script: Script, ignored: str) -> bool:
    """True if targets may have the ignored value: a name, or a number that the script itself puts among them."""
    if not re.fullmatch(r"-? *\d+", ignored):
        return True
    number = re.escape(ignored)
    fills = rf"(?:fill_?|full|full_like|where|pad)\([^#\n]*{number}\b|padding_value *= *{number}\b"
    lists = rf"\[ *{number} *\] *[*+]|[*+] *\[ *{number} *\]"  # and no index, as in `x[:, [-1]]`
    return bool(re.search(rf"{fills}|\] *= *{number}\b|{lists}|DataCollator", script.code))


def _tokens(script: Script) -> Iterator[Finding]:
    evaluations = {loop.frame.function for loop in script.evaluation_loops} - {None}
    counts = [
        call
        for call in script.calls
        if call.last in ("all_reduce", "reduce")
        and call.node.args
        and (call.frame.function not in evaluations or set(script.loops_around(call.frame)) & set(script.step_loops))
    ]
    if any(
        re.search(r"(?i)tok|count|num|mask|valid|denom|total|weight", text_of(call.positional(0))) for call in counts
    ):
        return
    weighted = any(call.argument("weight") is not None for call in script.backward_calls)
    if weighted or script.uses("num_items_in_batch") or not has_wrapped(script):
        return
    for call in script.named("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss"):
        ignored = call.argument("ignore_index")
        reduction = text_of(call.argument("reduction")).strip("\"'")
        if ignored is None or reduction in ("sum", "none") or not _is_filled_in(script, text_of(ignored)):
            continue
        function = call.frame.function
        is_known = function is not None and bool(script.values.called_from.get(function))
        if call.last == "cross_entropy" and is_known and not _in_training(script, call):
            continue  # of an evaluation
        yield found("EV505", call, f"{call.text} averages over the targets of one rank that aren't {text_of(ignored)}")
    for assignment in (each for file in script.files for each in file.assignments):
        value = assignment.value
        if not isinstance(value, cst.BinaryOperation) or not isinstance(value.operator, cst.Divide):
            continue
        if "loss" not in dotted(assignment.target) or ".sum()" not in text_of(value.left):
            continue
        divisors = [text_of(each) for each, _ in origins(script, value.right, assignment.frame, depth=1)]
        if any(re.search(r"(?i)(?:mask|!=|ne\(|tokens|valid|pad)[^/]*\.sum\(\)", each) for each in divisors) and any(
            loop in script.training_loops for loop in script.loops_around(assignment.frame)
        ):
            yield found(
                "EV505",
                (assignment.frame.file, assignment.line),
                f"{text_of(assignment.target)} is divided by {text_of(value.right)}, the tokens of one rank",
            )


def _learning_rate(script: Script) -> Iterator[Finding]:
    if not script.uses_torch_distributed or script.uses_accelerate or script.uses_fabric or not has_wrapped(script):
        return
    if re.search(r"(?i)warm_?up|LinearLR|OneCycleLR|scale_learning_rate|scaled_lr", script.code):
        return
    loaders = [each.site for each in script.training_loaders if each.site is not None]
    if not loaders or any(loader.name.startswith("evenstep.") or loader.has_star for loader in loaders):
        return
    for loader in loaders:
        size = loader.argument("batch_size", 1)
        if size is None or any(WORLD.search(text_of(each)) for each, _ in origins(script, size, loader.frame)):
            return
    site = loaders[0]
    rows = number(script, site.argument("batch_size", 1), site.frame)
    if rows is None or 2 * rows <= REFERENCE_BATCH:
        return
    for call in script.named("torch.optim.SGD"):
        rate = call.argument("lr", 1)
        texts = [text_of(each) for each, _ in origins(script, rate, call.frame)]
        if rate is not None and not any(WORLD.search(each) or "scale" in each for each in texts):
            shown = text_of(site.argument("batch_size", 1))
            yield found("EV506", call, f"lr={text_of(rate)} and batch_size={shown} are the same on any number of ranks")
            return


def _batch_norm(script: Script) -> Iterator[Finding]:
    if re.search(r"SyncBatchNorm|sync_batchnorm|sync_bn", script.code):
        return
    normalised = [call for call in script.calls if re.fullmatch(r"torch\.nn\.(?:Lazy)?BatchNorm[123]d", call.name)]
    normalised += [call for call in script.calls if re.match(r"torchvision\.models\.(?:wide_)?resne", call.name)]
    if not normalised:
        return
    for loader in script.training_loaders:
        site = loader.site
        if site is None or site.name != "torch.utils.data.DataLoader":
            continue
        size = site.argument("batch_size", 1)
        rows = number(script, size, site.frame)
        if rows is not None and 1 < rows <= FEW_ROWS:
            wraps = [call for call in script.calls if "wrapped" in script.kinds_made(call) and call.name not in ("",)]
            at = wraps[0] if wraps else normalised[0]
            layer = normalised[0]
            where = f"{layer.last} (line {layer.frame.file.source.place(layer.line)[0]})"
            yield found("EV507", at, f"{where} takes its statistics from {rows} rows a rank")
            return


def _schedulers(script: Script) -> Iterator[Finding]:
    loops = script.step_loops
    for call in script.calls:
        if "scheduler" not in script.kinds_made(call) or (call.frame.function is not None and call.last == "step"):
            continue
        if not call.name.startswith(("torch.optim.lr_scheduler.", "transformers.get_")):
            continue
        steps = [
            each
            for each in script.calls
            if each.last == "step"
            and any(one.site is call for one in script.things(each.receiver, each.frame))
            and any(loop in script.loops_around(each.frame) for loop in loops)
        ]
        if not steps:
            continue
        for keyword in ("total_steps", "T_max", "num_training_steps", "steps_per_epoch", "T_0", "total_iters"):
            length = call.argument(keyword)
            if length is None:
                continue
            expressions = list(origins(script, length, call.frame))
            if any(WORLD.search(text_of(each)) for each, _ in expressions):
                continue
            whole = next(
                (text_of(each) for each, where in expressions if _divides_all_samples(script, each, where)), ""
            )
            if whole and _divided_loaders(script):
                yield found("EV509", call, f"{keyword}={shortened(whole, 60)} counts the batches of all ranks together")
                break
            early = _counted_before_prepare(script, call, length)
            if early:
                yield found(
                    "EV509",
                    call,
                    f"{keyword} uses {early} of before accelerator.prepare, and the scheduler isn't prepared",
                    mend="loader, optimizer, scheduler = accelerator.prepare(loader, optimizer, scheduler)",
                )
                break


def _divides_all_samples(script: Script, node: cst.CSTNode, frame: Frame) -> bool:
    """True if `len(dataset)` is divided in it; the length of a loader is that of one rank's batches."""
    for each in walk(node):
        if isinstance(each, cst.BinaryOperation) and isinstance(each.operator, cst.Divide | cst.FloorDivide):
            length = each.left
            if not isinstance(length, cst.Call) or not length.args or dotted(length.func) != "len":
                continue
            counted = length.args[0].value
            kinds = script.values.kinds(counted, frame)
            name = re.fullmatch(r"(?:\w+\.)*\w*(?:data_?set|_set|_ds|_data)", dotted(counted))
            if "loader" not in kinds and (name or kinds & {"dataset", "subset"}):
                return True
    return False


def _divided_loaders(script: Script) -> bool:
    return any(
        each.site is not None
        and (each.site in script.values.prepared or not is_nothing(each.site.argument("sampler", 3)))
        and not each.site.name.startswith("evenstep.")
        for each in script.training_loaders
    )


def _counted_before_prepare(script: Script, scheduler: Call, length: cst.CSTNode) -> str:
    """`len(loader)` where it was read before the loader was divided, of a scheduler that accelerate doesn't step."""
    prepares = [call for call in script.named(".prepare") if "accelerator" in script.receiver_kinds(call)]
    if not prepares:
        return ""
    if any(
        one.site is scheduler for call in prepares for each in call.arguments for one in script.things(each, call.frame)
    ):
        return ""
    for inner in (inner for each, _ in origins(script, length, scheduler.frame) for inner in walk(each)):
        if not isinstance(inner, cst.Call) or dotted(inner.func) != "len" or not inner.args:
            continue
        record = script.values.record(inner)
        if record is None:
            continue
        divided = [one for one in script.things(inner.args[0].value, record.frame) if one.kind == "loader"]
        before = [call for call in prepares if call.frame.function is record.frame.function and record.line < call.line]
        if divided and before and all(one.site in script.values.prepared for one in divided):
            return text_of(inner)
    return ""


def _around_the_wrapper(script: Script) -> Iterator[Finding]:
    """Passes that no call of the wrapper begins."""
    wrappers = [
        thing for call in script.calls for thing in script.things(call.node, call.frame) if thing.kind == "wrapped"
    ]
    inner_models = {inner for wrapper in wrappers for inner in wrapper.inner if inner.kind in ("model", "instance")}
    for loop in script.step_loops:
        inside = [call for call in script.calls if loop in script.loops_around(call.frame)]
        if not wrappers or any("wrapped" in _kinds(script, call.node.func, call) for call in inside):
            continue
        makes_loss = {
            id(inner)
            for backward in script.backward_calls
            if loop in script.loops_around(backward.frame)
            for node in (backward.receiver, *backward.arguments)
            for each, _ in origins(script, node, backward.frame)
            for inner in walk(each)
        }
        for call in inside:
            callee = call.node.func
            past = [each for each in walk(callee) if isinstance(each, cst.Attribute) and each.attr.value == "module"]
            called = script.things(callee, call.frame) | script.things(call.receiver, call.frame)
            goes_around = any("wrapped" in _kinds(script, each.value, call) for each in past) or (
                bool(called & inner_models) and not any(each.kind == "wrapped" for each in called)
            )
            if id(call.node) in makes_loss and goes_around:
                yield found(
                    "EV510", call, f"{call.text} goes around the wrapper, and {_text_of_loop(loop)} never calls that"
                )
                break


def _around_the_scale(script: Script) -> Iterator[Finding]:
    """`loss.backward()` where accelerate or Fabric scales the loss itself."""
    makers = [(call, call.argument("mixed_precision")) for call in script.named("accelerate.Accelerator")]
    makers += [(call, call.argument("precision")) for call in script.named(".Fabric")]
    for _, precision in makers:
        if text_of(precision).strip("\"'") not in ("fp16", "16", "16-mixed"):
            continue
        for backward in script.backward_calls:
            if not script.receiver_kinds(backward) & {"accelerator", "fabric"} and not backward.node.args:
                name = "accelerator" if script.uses_accelerate else "fabric"
                yield found(
                    "EV511",
                    backward,
                    f"{backward.text} has no loss scale, and the step divides by it",
                    mend=f"{name}.backward({text_of(backward.receiver)})",
                )


def _kinds(script: Script, node: cst.CSTNode, call: Call) -> set[str]:
    return {thing.kind for thing in script.things(node, call.frame)}


def _text_of_loop(loop: Loop) -> str:
    return "the training loop" if loop.iterates is None else f"the loop over {shortened(text_of(loop.iterates), 40)}"
