"""Rules about devices: which GPU a rank uses, and when the host waits for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import (
    assignments_to,
    found,
    is_true,
    names_in,
    on_all_ranks,
    on_ranks,
    origins,
    per_step,
    walk,
)
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Call, text_of

_MODELS = {"model", "wrapped", "data parallel"}
_OF_TRAINING = re.compile(
    r"(?i)loss|acc|correct|norm|output|pred|logit|grad|\.sum\(|\.mean\(|argmax|\.eq\(|score|metric|perplexity"
)


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    if not script.is_distributed or not script.uses_gpus:
        return
    if script.uses_torch_distributed and not script.uses_accelerate and not script.uses_fabric:
        yield from _no_set_device(script)
    yield from _first_gpu(script)
    yield from _global_rank(script)
    yield from _by_way_of_the_host(script)
    if not script.uses_accelerate and not script.uses_fabric:
        yield from _pinned(script)
    yield from _waits(script)


def _no_set_device(script: Script) -> Iterator[Finding]:
    if script.named(".set_device", "torch.cuda.device") or script.uses("device_id"):
        return
    if re.search("CUDA_VISIBLE_DEVICES", script.code) or not script.named("torch.distributed.init_process_group"):
        return  # a library that makes the group may choose the device, too
    for call in script.calls:
        where = call.positional(0) or call.argument("device")
        names_cuda = re.fullmatch(r"[\"']cuda[\"'](?: if .* else .*)?", text_of(where) or "")
        has_number = call.last == "device" and call.argument("index", 1) is not None
        bare = call.last == "cuda" and call.receiver is not None and not call.node.args and call.name != "torch.cuda"
        if (bare or (call.last in ("device", "to") and names_cuda and not has_number)) and on_ranks(script, call):
            yield found("EV301", call, f"{call.text} is GPU 0 on every rank: there is no torch.cuda.set_device")
            return


def _first_gpu(script: Script) -> Iterator[Finding]:
    numbers = set(re.findall(r"(?:[\"']cuda:|\.cuda\(|\.to\()(\d+)", script.code))
    if len(numbers) > 1:
        return  # each rank drives several GPUs
    seen: set[int] = set()
    for call in script.calls:
        if id(call.node) in seen:
            continue
        first, second = text_of(call.positional(0)), text_of(call.positional(1))
        location = text_of(call.argument("map_location"))
        fixed = (
            (
                call.last in ("device", "to", "set_device", "set_default_device")
                and re.fullmatch(r"[\"']cuda:\d+[\"'].*", first)
            )
            or (call.name == "torch.device" and first in ("'cuda'", '"cuda"') and second.isdecimal())
            or (call.last in ("cuda", "set_device") and call.receiver is not None and first.isdecimal())
            or (call.last == "to" and first.isdecimal())
            or (call.name == "torch.load" and re.fullmatch(r"[\"']cuda:\d+[\"']", location))
            or re.fullmatch(r"[\"']cuda:\d+[\"']", text_of(call.argument("device")))
            or (
                "DistributedDataParallel" in call.name
                and re.fullmatch(r"\[\d+\]", text_of(call.argument("device_ids", 1)))
            )
        )
        if fixed and on_all_ranks(script, call) and not any(id(each) in seen for each in walk(call.node)):
            seen |= {id(each) for each in walk(call.node)}
            yield found("EV302", call, f"{call.text} is the same GPU on every rank")


def _global_rank(script: Script) -> Iterator[Finding]:
    if script.starts_ranks or script.uses_accelerate or script.uses_fabric or script.uses_evenstep:
        return
    for call in script.calls:
        given = [call.argument("device_ids", 1)] if "DistributedDataParallel" in call.name else []
        if call.last in ("set_device", "cuda", "to", "device"):
            given = [call.positional(0), call.positional(1), call.argument("device")]
        names = [each for node in given for each in walk(node) if isinstance(each, cst.Name | cst.Attribute | cst.Call)]
        if any(script.values.kinds(each, call.frame) == {"rank"} for each in names) and _is_global(script, names, call):
            yield found("EV306", call, f"{call.text} takes the global rank as the number of a GPU")
            return


def _is_global(script: Script, names: Sequence[cst.CSTNode], call: Call) -> bool:
    """True if a name surely is the global rank: the process group, or a launcher's variable, has said so."""
    texts = (text_of(each) for name in names for each, _ in origins(script, name, call.frame))
    return any(
        re.search(r"\bget_rank\(\)|[\"'](?:RANK|SLURM_PROCID|OMPI_COMM_WORLD_RANK)[\"']", each) for each in texts
    )


def _by_way_of_the_host(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        target = text_of(call.positional(0))
        goes_up = (call.last == "cuda" and call.receiver is not None) or (
            call.last == "to" and re.search(r"(?i)cuda|device|rank|gpu", target) is not None
        )
        if goes_up and _comes_from_the_host(script, call):
            yield found("EV303", call, f"{call.text} comes back from the host's memory")
        elif (
            call.last in ("all_gather_object", "gather_object", "broadcast_object_list") and "distributed" in call.name
        ):
            sent = call.positional(0) if call.last != "all_gather_object" else call.argument("obj", 1)
            if sent is not None and _is_tensor(script, sent, call):
                yield found("EV303", call, f"{call.text} pickles a tensor, by way of the host")


def _comes_from_the_host(script: Script, call: Call) -> bool:
    receiver = call.receiver
    if receiver is None:
        return False
    inner: cst.CSTNode = receiver
    while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
        if inner.func.attr.value == "cpu":
            return True
        inner = inner.func.value
    if isinstance(receiver, cst.Name):
        values = assignments_to(script, receiver.value, call.frame)
        return bool(values) and all(re.search(r"\.cpu\(\)$", text_of(each.value)) is not None for each in values)
    return False


def _is_tensor(script: Script, node: cst.CSTNode, call: Call) -> bool:
    pattern = re.compile(r"\.detach\(\)|\.cpu\(\)$|torch\.(?:stack|cat|tensor|zeros|ones)\(")
    if pattern.search(text_of(node)):
        return True
    if isinstance(node, cst.Name):
        values = assignments_to(script, node.value, call.frame)
        return bool(values) and all(pattern.search(text_of(each.value)) for each in values)
    return False


def _pinned(script: Script) -> Iterator[Finding]:
    loaders = [
        each.site
        for each in script.training_loaders
        if each.site is not None and each.site.name == "torch.utils.data.DataLoader" and not each.site.has_star
    ]
    copies = [call for call in _copies(script) if per_step(script, call)]
    if not loaders or not copies:
        return
    non_blocking = [call for call in copies if is_true(call.argument("non_blocking"))]
    pinned = [call for call in loaders if is_true(call.argument("pin_memory", 7))]
    if pinned and not script.uses("non_blocking"):
        first = min(copies, key=lambda each: (each.line, each.column))
        yield found("EV304", first, f"{first.text} blocks, though the loader has pin_memory=True")
    elif non_blocking and not script.uses("pin_memory"):
        loader = min(loaders, key=lambda each: each.line)
        yield found("EV304", loader, f"{loader.text} has no pin_memory, so that non_blocking=True has no effect")


def _copies(script: Script) -> Iterator[Call]:
    """Copies of a batch to the device."""
    for call in script.calls:
        if call.receiver is None or script.receiver_kinds(call) & _MODELS:
            continue
        where = text_of(call.positional(0) or call.argument("device"))
        copies = call.last == "cuda" or (call.last == "to" and where and not where.startswith("torch."))
        if copies and isinstance(call.receiver, cst.Name | cst.Subscript | cst.Attribute):
            yield call


def _waits(script: Script) -> Iterator[Finding]:
    reported: set[tuple[int, int]] = set()
    for call in script.calls:
        place = (id(call.frame.file), call.line)
        if place in reported or not _waits_for_the_device(script, call) or not per_step(script, call):
            continue
        reported.add(place)
        yield found("EV305", call, f"{call.text} in every step")


def _waits_for_the_device(script: Script, call: Call) -> bool:
    if call.name == "torch.cuda.synchronize":
        return True
    if call.last in ("item", "tolist") and call.receiver is not None and not call.node.args:
        receiver = text_of(call.receiver)
        if re.match(r"(?:world|fabric|accelerator)\.", receiver):
            return False
        return bool(_OF_TRAINING.search(receiver))
    if call.last == "cpu" and call.receiver is not None and not script.receiver_kinds(call):
        return bool(_OF_TRAINING.search(text_of(call.receiver)))
    if call.name == "float" and len(call.node.args) == 1:
        return bool(re.fullmatch(r"(?:\w+\.)*\w*loss\w*", text_of(call.node.args[0].value)))
    if call.name == "print":
        return any(re.fullmatch(r"\w*loss", name) for each in call.arguments for name in names_in(each)) and (
            ".item()" not in call.text
        )
    return False
