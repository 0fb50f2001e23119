"""no destroy_process_group (note).

The process group is never destroyed.

Ranks end while others still communicate: warnings, hangs at exit, and leaked resources.

Wrong:

```python
dist.init_process_group()
```

Right:

```python
dist.init_process_group()
try:
    train()
finally:
    dist.destroy_process_group()
```

Ignore it if a library that the script calls does it.
"""

from evenstep.tools.doctor.asking import Found, Script, found, text_of
from evenstep.tools.doctor.scene import Refuted, Scene, Seen


def read(script: Script) -> Found:
    """A process group that the script never destroys, other than torch's fake one."""
    for call in script.named("torch.distributed.init_process_group"):
        if "fake" not in text_of(call.argument("backend", 0)) and not script.uses("destroy_process_group"):
            yield found(call, f"{call.text} has no dist.destroy_process_group()")
            return


def seen(run: Scene) -> Seen:
    """A process group that was still open when the script ended normally."""
    made = next((each for each in run.evidence.all("init") if each["by_script"]), None)
    ends = run.evidence.of("end", hurried=True)
    fine = all(each["status"] == "0" for events in ends for each in events)
    if made is None or not all(ends) or not fine or run.evidence.all("left", hurried=True):
        return
    if all(each["has_group"] for events in ends for each in events):
        yield run.finding(made.place, "the script ended with its process group still open")
    else:
        yield Refuted()
