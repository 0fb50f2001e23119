"""all ranks print or log (warning).

Every rank prints or logs the same lines.

The output has every line as often as there are ranks, mixed, and none says whose it is.

Wrong:

```python
for epoch in range(10):
    optimizer.step()
    print("epoch", epoch, "is done")
```

Right:

```python
for epoch in range(10):
    optimizer.step()
    if rank == 0:
        print("epoch", epoch, "is done")
```

A line that says which rank prints it is no finding. Ignore the rule if the launcher keeps one file per rank.
"""

import re

from evenstep.tools.doctor.asking import (
    BARS,
    Call,
    Found,
    Script,
    dotted,
    found,
    guarded,
    has_argument_of_rank,
    in_training_or_evaluation,
    on_all_ranks,
    text_of,
)

_PRINTS = ("print", "builtins.print", "__builtin__.print", "__builtins__.print", "sys.stdout")
_LOUD = ("INFO", "DEBUG", "'INFO'", '"INFO"')


def read(script: Script) -> Found:
    """Prints and progress-bar writes in training and evaluation, and logging if every rank shows INFO."""
    if _prints_otherwise(script):
        return
    logs = _logs_on_all_ranks(script)
    for call in script.calls:
        is_print = call.name == "print" or (BARS.fullmatch(call.name.removesuffix(".write")) and call.last == "write")
        is_log = logs and call.last in ("info", "warning", "debug") and _is_logger(call)
        if not (is_print or is_log) or call.argument("file") is not None or has_argument_of_rank(script, call):
            continue
        if on_all_ranks(script, call) and in_training_or_evaluation(script, call):
            mend, edits = guarded(script, call)
            yield found(call, f"{call.text} runs on every rank", mend=mend, edits=edits)


def _prints_otherwise(script: Script) -> bool:
    """Whether the script replaces `print`, at the top level or in a function that is called."""
    own = (file.functions.get("print") for file in script.files)
    if script.named(".setup_for_distributed") or any(each and each.frame.kind == "module" for each in own):
        return True
    assigned = [each for file in script.files for name in _PRINTS for each in file.assigned.get(name, [])]
    functions = [each.frame.function for each in assigned]
    return any("print" in file.imports for file in script.files) or any(
        each is None or each in script.passed or bool(script.called_from.get(each)) for each in functions
    )


def _logs_on_all_ranks(script: Script) -> bool:
    """Whether logging is set up to show INFO on every rank."""
    quiet = script.named(".setLevel", ".disable", ".addFilter")

    def is_of_all(call: Call) -> bool:
        return on_all_ranks(script, call) and not has_argument_of_rank(script, call)

    if script.named("accelerate.logging.get_logger") or not all(map(is_of_all, quiet)):
        return False
    loud = [call for call in script.named("logging.basicConfig") if is_of_all(call)]
    return any(text_of(call.argument("level")).rpartition(".")[2] in _LOUD for call in loud)


def _is_logger(call: Call) -> bool:
    return call.name.startswith("logging.") or bool(
        re.fullmatch(r"(?i)_?(?:\w+\.)*_?(?:logger|log)", dotted(call.receiver))
    )
