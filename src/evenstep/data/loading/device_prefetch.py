"""Prefetching batches to the rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from evenstep.data.loading.fetch import Loaded
from evenstep.data.loading.nested import move, pinned, used_on

Tag = TypeVar("Tag")


def on_device(
    items: Iterator[tuple[Tag, Loaded]], device: torch.device, *, pin: bool, are_pinned: bool
) -> Iterator[tuple[Tag, Loaded]]:
    """Move batches to `device`; on CUDA one batch ahead, on a separate stream.

    While the user's kernels work on one batch, the next is loaded and copied; the user's stream waits for the copy, the
    host doesn't.

    Args:
        items: Batches, each with a tag.
        device: The device to which batches are moved.
        pin: Copy from pinned memory, so that the host needn't wait for the copy.
        are_pinned: The batches are in pinned memory already.
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
            yield _after_copy(device, *waiting)
        waiting = (tag, moved, done)
    if waiting is not None:
        yield _after_copy(device, *waiting)


def _after_copy(device: torch.device, tag: Tag, loaded: Loaded, done: Any) -> tuple[Tag, Loaded]:
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    # The batch's memory belongs to the copy stream, which must not reuse it while this stream still reads it.
    used_on(loaded.batch, stream)
    return tag, loaded
