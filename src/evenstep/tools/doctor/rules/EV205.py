r"""two ranks write one file (error).

Every rank writes the same file.

Lines are lost or mixed, and the last rank decides what the file holds.

Downloading a data set on all ranks at once is the same mistake.

Wrong:

```python
with open("losses.csv", "a") as file:
    file.write("0.5\n")
```

Right:

```python
if rank == 0:
    with open("losses.csv", "a") as file:
        file.write("0.5\n")
```

A path with the rank in it is no finding, nor is a file that is renamed into place with `os.replace`. Ignore it where
every rank has a file system of its own.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    Call,
    Found,
    Script,
    behind,
    distributed,
    found,
    guarded,
    is_of_a_rank,
    is_true,
    on_all_ranks,
    text_of,
)
from evenstep.tools.doctor.scene import Scene, Seen, same_paths

_WRITERS = (".savefig", ".to_csv", ".write_text", ".write_bytes", "numpy.save", "numpy.savez", ".save_image")
_WRITING = re.compile(r"[\"'](?:[wax]\+?[bt]?\+?|[wax][bt]\+?)[\"']")
_WRITTEN_OUT = r"^[rbuRBU]*([\"'])[^\"']*\1$"
_PACKED = re.compile(r"(?:gzip|lzma|tarfile|zipfile|bz2|wave|Image)\.")


def read(script: Script) -> Found:
    """Files opened for writing, calls that write a file, and downloads, on every rank."""
    for call in script.calls:
        if call.name.startswith("torchvision.datasets.") and is_true(call.argument("download")):
            if on_all_ranks(script, call) and not _is_done_before(script, call):
                mend, _ = guarded(script, call)
                mend += f"\n{distributed(call.frame.file)}.barrier()  # then every rank opens what is there"
                yield found(call, f"{call.text} downloads on every rank at the same time", mend=mend)
            continue
        path = _path(call)
        # A file that is written under another name and then renamed is complete, whichever rank is last.
        moves = script.named("os.replace", "os.rename", "shutil.move") if path is not None else []
        if path is None or any(each.frame.function is call.frame.function for each in moves):
            continue
        # In another module than the script, a path that isn't written out may differ between ranks.
        is_known = call.frame.file is script.files[0] or behind(script, path, call.frame, _WRITTEN_OUT, 2)
        if is_known and on_all_ranks(script, call) and not is_of_a_rank(script, path, call):
            mend, edits = guarded(script, call)
            text = text_of(call.node)
            mend = mend.replace(f"    {text}", f"    with {text} as file: ...") if call.last == "open" else mend
            yield found(call, f"{call.text} writes the same file on every rank", mend=mend, edits=edits)


def seen(run: Scene) -> Seen:
    """Files that several ranks wrote, other than checkpoints."""
    saved = {path for events in run.evidence.of("save", hurried=True) for each in events if (path := each["path"])}
    for path, places in same_paths(run, "write").items():
        if path not in saved and not path.endswith((".pyc", ".lock")):
            yield run.finding(places[0], f"{len(places)} ranks wrote {path.rpartition('/')[2]}")


def _path(call: Call) -> cst.CSTNode | None:
    """The path of the file that a call writes; None for other calls."""
    if call.name == "open" or (call.last == "open" and call.receiver is not None and call.name != "os.open"):
        mode = call.argument("mode", 1 if call.name == "open" or _PACKED.match(call.name) else 0)
        if not _WRITING.fullmatch(text_of(mode)):
            return None
        is_method = call.name != "open" and not _PACKED.match(call.name)
        return call.receiver if is_method else call.argument("file", 0)
    if f".{call.last}" in _WRITERS or call.name in _WRITERS:
        return call.receiver if call.last in ("write_text", "write_bytes") else call.positional(0)
    return None


def _is_done_before(script: Script, download: Call) -> bool:
    """Whether another download of the same data set may be guarded, so that this call finds the files."""
    same = [call for call in script.calls if call is not download and call.name == download.name]
    return any(script.perhaps_some_ranks_only(call.frame) for call in same)
