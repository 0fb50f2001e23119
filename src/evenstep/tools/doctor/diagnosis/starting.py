"""Rules about starting: how ranks come to be, and how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.tools.doctor.diagnosis.asking import assignments_to, found, has_wrapped, models_of, origins
from evenstep.tools.doctor.findings import Finding
from evenstep.tools.reading.contexts import Script
from evenstep.tools.reading.program import Call, dotted, text_of


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    yield from _ports(script)
    yield from _launch(script)
    yield from _data_parallel(script)
    yield from _nothing_averages(script)
    groups = [
        call
        for call in script.named("torch.distributed.init_process_group")
        if "fake" not in text_of(call.argument("backend", 0))  # of torch's tests: it communicates with nobody
    ]
    if groups and not script.uses("destroy_process_group"):
        call = groups[0]
        yield found("EV604", call, f"{call.text} has no dist.destroy_process_group()")


def _ports(script: Script) -> Iterator[Finding]:
    for file in script.files:
        for each in file.assignments:
            if not isinstance(each.target, cst.Subscript) or file.resolve(dotted(each.target)) != "os.environ":
                continue
            if "MASTER_PORT" not in text_of(each.target) or any(
                "MASTER_" in text_of(f.test) for f in each.frame.outwards()
            ):
                continue
            values = [text_of(value) for value, _ in origins(script, each.value, each.frame, depth=2)]
            if any(re.fullmatch(r"(?:str\()?[\"']?\d{2,5}[\"']?\)?", value) for value in values[:2]):
                yield found("EV601", (file, each.line), f"{text_of(each.target)} = {text_of(each.value)}")
    for call in script.named("torch.distributed.init_process_group"):
        method = text_of(call.argument("init_method", 1))
        if re.fullmatch(r"[\"']tcp://[^\"'{}]*:\d+[\"']", method):
            yield found("EV601", call, f"init_method={method}")


def _launch(script: Script) -> Iterator[Finding]:
    if re.search(r"environ(?:\.get)?[\[(]\s*[\"']LOCAL_RANK|getenv\(\s*[\"']LOCAL_RANK", script.code):
        return
    for file in script.files:
        number = next(
            (
                number
                for number, line in enumerate(file.source.text.split("\n"), start=1)
                if re.search(r"""-m[\s"',]+torch\.distributed\.launch\b""", line)
            ),
            None,
        )
        if number is not None:
            yield found("EV603", (file, number), "torch.distributed.launch is deprecated: torchrun has replaced it")
            continue
        if not script.named("torch.distributed.init_process_group"):
            return
        for call in file.calls:
            flags = [text_of(each).strip("\"'") for each in call.arguments[:2]]
            if call.last == "add_argument" and {"--local_rank", "--local-rank"} & set(flags):
                yield found("EV603", call, f"{call.text}, and LOCAL_RANK of the environment is never read")
                break


def _data_parallel(script: Script) -> Iterator[Finding]:
    if script.uses_torch_distributed:
        return  # the script can do both
    for call in script.named("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
        yield found("EV605", call, f"{call.text} drives all GPUs from one process")


_EXCHANGES: tuple[str, ...] = (
    "fully_shard",
    "parallelize_module",
    "parallelize",
    "attach",
    "replicate",
    "PipelineStage",
)
_EXCHANGES += ("DistributedDataParallel", "FullyShardedDataParallel", "register_hook", "rpc")
_EXCHANGES += ("register_post_accumulate_grad_hook", "send", "recv", "isend", "irecv", "batch_isend_irecv")
_EXCHANGES += ("PeriodicModelAverager", "PostLocalSGDOptimizer")


def _nothing_averages(script: Script) -> Iterator[Finding]:
    """A process group, a model and an optimizer that are known, and nothing between ranks that touches gradients."""
    libraries = ("deepspeed", "horovod", "megatron", "fairscale", "colossalai", "apex", "lightning", "accelerate")
    if not script.named("torch.distributed.init_process_group") or script.uses(*_EXCHANGES) or has_wrapped(script):
        return
    if any(map(script.imports, (*libraries, "evenstep", "pytorch_lightning", "lightning_fabric", "torchtitan"))):
        return
    sent = [
        text_of(each)
        for call in script.calls
        if call.name.startswith("torch.distributed.")
        for argument in call.arguments
        for each, _ in origins(script, argument, call.frame, depth=1)
    ]
    if any(re.search(r"(?i)grad|param|state|model|module|weight|flat|buffer|net\b", each) for each in sent):
        return
    for step in script.step_calls:
        optimizers = [each.site for each in script.things(step.receiver, step.frame) if each.kind == "optimizer"]
        around = script.loops_around(step.frame)
        backward = [each for each in script.backward_calls if around and around[0] in script.loops_around(each.frame)]
        if (
            optimizers
            and backward
            and all(site is not None and _is_of_a_known_model(script, site) for site in optimizers)
        ):
            yield found("EV606", backward[0], f"{backward[0].text} leaves each rank with gradients of its own")
            return


def _is_of_a_known_model(script: Script, optimizer: Call) -> bool:
    """True if an optimizer has the parameters of a model that only functions of the script, or torch's, were given."""
    model = next(iter(models_of(optimizer)), "")
    values = assignments_to(script, model, optimizer.frame)
    if not values or not all(script.values.kinds(each.value, each.frame) & {"model", "instance"} for each in values):
        return False
    strangers = [
        call
        for call in script.calls
        if not script.values.functions_of(call)
        and not call.name.startswith(("torch.", "print", "len", "sum", "isinstance"))
        if any(dotted(each) == model for each in call.arguments)
    ]
    return not strangers
