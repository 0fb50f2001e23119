"""Batches on the rank's device before they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from evenstep.data.fetch import Loaded
from evenstep.data.nested import move, pinned, used_on

Tag = TypeVar("Tag")


def on_device(
    items: Iterator[tuple[Tag, Loaded]], device: torch.device, *, pin: bool, are_pinned: bool
) -> Iterator[tuple[Tag, Loaded]]:
    """Move batches to `device`, on CUDA one ahead and on a stream of its own.

    While the user's kernels work on one batch, the next is loaded and copied; the user's stream waits for the copy, the
    host doesn't.

    Args:
        items: Batches, with whatever goes with them.
        device: Where they go.
        pin: Copy out of pinned memory, which alone can be copied from without the host waiting.
        are_pinned: They are in pinned memory already.
    """
    if device.type != "cuda":
        for tag, loaded in items:
            yield tag, loaded._replace(batch=move(loaded.batch, device, non_blocking=False))
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[Tag, Loaded, Any] | None = None
    for tag, loaded in items:
        batch = loaded.batch if are_pinned or not pin else pinned(loaded.batch)
        with torch.cuda.stream(stream):
            moved = loaded._replace(batch=move(batch, device, non_blocking=pin))
            done = stream.record_event()
        if waiting is not None:
            yield _handed_over(device, *waiting)
        waiting = (tag, moved, done)
    if waiting is not None:
        yield _handed_over(device, *waiting)


def _handed_over(device: torch.device, tag: Tag, loaded: Loaded, done: Any) -> tuple[Tag, Loaded]:
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    # The memory was taken on the copying stream: it must not be given away there while this one still reads it.
    used_on(loaded.batch, stream)
    return tag, loaded
