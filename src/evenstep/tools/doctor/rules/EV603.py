"""torch.distributed.launch (note).

The script is written for torch.distributed.launch, which passes --local_rank as an argument.

torchrun and other launchers set LOCAL_RANK instead, so that every rank keeps the default, usually 0.

Wrong:

```python
parser.add_argument("--local_rank", type=int, default=0)
dist.init_process_group()
```

Right:

```python
local_rank = int(os.environ["LOCAL_RANK"])
```

Ignore it if the script reads the rank in another way that can't be seen.
"""

import re

from evenstep.tools.doctor.asking import Found, Script, found, text_of


def read(script: Script) -> Found:
    """The deprecated launcher's name, or its argument."""
    if re.search(r"environ(?:\.get)?[\[(]\s*[\"']LOCAL_RANK|getenv\(\s*[\"']LOCAL_RANK", script.code):
        return
    for file in script.files:
        lines = enumerate(file.source.text.split("\n"), start=1)
        named = [number for number, line in lines if re.search(r"""-m[\s"',]+torch\.distributed\.launch\b""", line)]
        if named:
            yield found((file, named[0]), "torch.distributed.launch is deprecated: torchrun has replaced it")
            continue
        for call in file.calls if script.named("torch.distributed.init_process_group") else ():
            flags = {text_of(each).strip("\"'") for each in call.arguments[:2]}
            if call.last == "add_argument" and {"--local_rank", "--local-rank"} & flags:
                yield found(call, f"{call.text}, and LOCAL_RANK of the environment is never read")
                break
