"""How ranks began and ended: ports, backends, devices, the process group. Pure."""

from __future__ import annotations

import re

from evenstep.tools.doctor.evidence.scene import Scene, by_place
from evenstep.tools.doctor.findings import Finding, Refuted

_OF_GPUS = ("nccl", "no cuda", "not compiled with cuda", "no nvidia", "_cuda_", "invalid device ordinal", "no gpu")


def judge(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    """All of this group."""
    ends, refuted = _ends(scene)
    return [*_ports(scene), *_devices(scene), *_waits(scene), *ends], refuted


def _ports(scene: Scene) -> list[Finding]:
    made = [events[0] for events in scene.evidence.of("init") if events]
    ports = {each["port"] for each in made}
    if len(made) < scene.world_size or len(ports) > 1 or None in ports:
        return []  # a port that was free is another one on every rank
    seen = f"the group was made at port {ports.pop()}, whatever the launcher said"
    return [scene.finding("EV601", made[0].place, seen)]


def is_for_want_of_gpus(message: str) -> bool:
    """Whether an error says that there is no GPU, or nothing in torch that could use one."""
    return any(each in message.lower() for each in _OF_GPUS)


def asks_for_gpus(said: str) -> bool:
    """Whether the last words of a script that has ended by itself are that it needs a GPU."""
    last = "\n".join(said.splitlines()[-4:])
    return bool(re.search(r"(?i)\b(?:gpus?|cuda)\b", last)) or is_for_want_of_gpus(last)


def _devices(scene: Scene) -> list[Finding]:
    wrapped = [events[0] for events in scene.evidence.of("wrapped") if events]
    devices = {str(each["device"]) for each in wrapped}
    if len(wrapped) < 2 or len(devices) > 1 or not devices.pop().startswith("cuda"):
        return []
    chosen = scene.evidence.all("device")
    seen = f"the models of {len(wrapped)} ranks are on {wrapped[0]['device']}"
    return [scene.finding("EV302" if chosen else "EV301", wrapped[0].place, seen)]


def _waits(scene: Scene) -> list[Finding]:
    """Lines that made the host wait for its GPU in every other step at least, of those that were listened to."""
    found = []
    waits = scene.evidence.of("sync")[0] if scene.evidence.ranks else []
    num_steps = len({each.step for each in waits})
    for place, events in by_place(waits).items():
        if len(events) >= max(2, num_steps / 2):
            seen = f"the host waited for the device here {len(events)} times in {num_steps} steps"
            found.append(scene.finding("EV305", place, seen))
    return found


def _ends(scene: Scene) -> tuple[list[Finding], list[Refuted]]:
    made = next((each for each in scene.evidence.all("init") if each["by_script"]), None)
    ends = scene.evidence.of("end", hurried=True)
    was_ended = scene.evidence.of("left", hurried=True)
    if (
        made is None
        or not all(ends)
        or any(was_ended)
        or any(each["status"] != "0" for events in ends for each in events)
    ):
        return [], []
    if all(each["has_group"] for events in ends for each in events):
        return [scene.finding("EV604", made.place, "the script ended with its process group still open")], []
    return [], [Refuted("EV604")]
