"""Rules about starting: how ranks come to be, and how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from evenstep.doctor.diagnosis.asking import found, origins
from evenstep.doctor.findings import Finding
from evenstep.doctor.reading.contexts import Script
from evenstep.doctor.reading.program import dotted, text_of


def check(script: Script) -> Iterator[Finding]:
    """Findings of this group."""
    yield from _ports(script)
    yield from _launch(script)
    yield from _data_parallel(script)
    groups = [
        call
        for call in script.named("torch.distributed.init_process_group")
        if "fake" not in text_of(call.argument("backend", 0))  # of torch's tests: it communicates with nobody
    ]
    if groups and "destroy_process_group" not in script.text:
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
        if re.search(r"environ(?:\.get)?[\[(]\s*[\"']LOCAL_RANK|getenv\(\s*[\"']LOCAL_RANK", script.text):
            continue
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
