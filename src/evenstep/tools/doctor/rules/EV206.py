"""checkpoint of the wrapper (warning).

The state_dict of the wrapper is saved instead of the model's own.

Every name in the file begins with `module.`, and a model without the wrapper can't load it.

Wrong:

```python
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
```

Right:

```python
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
```

Ignore it if only this script reads the file, and loads it into the wrapper.
"""

from evenstep.tools.doctor.asking import (
    Found,
    Script,
    by_library,
    found,
    saves,
    text_of,
    with_what,
    wrappers_at,
)
from evenstep.tools.doctor.scene import Scene, Seen, by_place


def read(script: Script) -> Found:
    """Saved `state_dict`s of an object that certainly is the wrapper."""
    if script.uses("consume_prefix_in_state_dict_if_present") or any(each[1:-1] == "module." for each in script.texts):
        return
    for save in with_what(script, saves(script)):
        saved = script.parts(script.values(save.argument("obj", 0), save.frame))
        for site in script.makers((each for each in saved if each.inner), "state"):
            makers = script.makers(wrappers_at(script, site.receiver, site.frame, site.line))
            others = [each for each in makers if "fabric" in script.receiver_kinds(each) or "FullySh" in each.name]
            if makers and not others:
                receiver = text_of(site.receiver)
                inner = by_library(script, site, accelerate=f"accelerator.unwrap_model({receiver})")
                yield found(
                    site,
                    f"{receiver} is the wrapper, so that every name in the file begins with `module.`",
                    mend=f"{inner or receiver + '.module'}.state_dict()",
                )


def seen(run: Scene) -> Seen:
    """Saved files whose names all begin with `module.`."""
    prefixed = [each for each in run.evidence.all("save", hurried=True) if each["has_prefix"]]
    for place in by_place(prefixed):
        yield run.finding(place, "the names in the file began with `module.`")
