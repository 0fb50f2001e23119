"""fixed port (warning).

The port of the rendezvous is written into the script.

Two runs on one host collide, or join each other; the launcher's own port is overwritten.

Wrong:

```python
os.environ["MASTER_PORT"] = "29500"
```

Right:

```python
os.environ.setdefault("MASTER_ADDR", "localhost")
```

Launchers set `MASTER_ADDR` and `MASTER_PORT`. Ignore it if a firewall lets one port through only.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import Found, Script, behind, dotted, found, text_of
from evenstep.tools.doctor.scene import Scene, Seen


def read(script: Script) -> Found:
    """`MASTER_PORT` with a number, and addresses with one."""
    for file in script.files:
        for each in file.assignments:
            is_port = isinstance(each.target, cst.Subscript) and "MASTER_PORT" in text_of(each.target)
            if not is_port or file.resolve(dotted(each.target)) != "os.environ":
                continue
            is_asked = any("MASTER_" in text_of(around.test) for around in each.frame.outwards())
            if not is_asked and behind(script, each.value, each.frame, r"^(?:str\()?[\"']?\d{2,5}[\"']?\)?$", 2):
                yield found((file, each.line), f"{text_of(each.target)} = {text_of(each.value)}")
    for call in script.named("torch.distributed.init_process_group"):
        method = text_of(call.argument("init_method", 1))
        if re.fullmatch(r"[\"']tcp://[^\"'{}]*:\d+[\"']", method):
            yield found(call, f"init_method={method}")


def seen(run: Scene) -> Seen:
    """Ranks that met at one port of the script's; a port that was free is another one on every rank."""
    made = [events[0] for events in run.evidence.of("init") if events]
    ports = {each["port"] for each in made}
    if len(made) == run.world_size and len(ports) == 1 and None not in ports:
        evidence = f"the group was made at port {ports.pop()}, whatever the launcher said"
        yield run.finding(made[0].place, evidence)
