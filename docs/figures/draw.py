"""Draws the pictures of the site. Run it from the root: python docs/figures/draw.py

Colours are readable on white and on black: a picture can't know which mode a reader has chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #6e7781 } .in { fill: #fff; font-weight: 600 }
.small { font-size: 12px } .strong { font-weight: 600 }
.line { stroke: #8c959f; stroke-width: 1.5; fill: none } .outline { stroke: #8c959f; stroke-width: 1.5; fill: none }
.forward { fill: #2f6f9f } .backward { fill: #8a4b9c } .bucket { fill: #bc5a1c } .step { fill: #2d7d46 }
.idle { fill: #8c959f; opacity: .35 }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4 } .in { fill: #fff } }
"""


def picture(width: int, height: int, says: str, *parts: str) -> str:
    """A whole SVG file; `says` is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{says}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def box(kind: str, x: float, y: float, width: float, words: str = "", height: float = 30) -> str:
    """A bar with a text in its middle."""
    bar = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
    return bar + text(x + width / 2, y + height / 2 + 4, words, "in small", "middle") if words else bar


def frame(x: float, y: float, width: float, height: float, *lines: str) -> str:
    """An outlined box with centred lines, the first of them strong."""
    top = y + height / 2 + 5 - 9 * (len(lines) - 1)
    rows = [
        text(x + width / 2, top + 18 * number, line, "small" if number else "strong", "middle")
        for number, line in enumerate(lines)
    ]
    return f'<rect class="outline" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>' + "".join(rows)


def arrow(*points: tuple[float, float]) -> str:
    """A line along points, with a head at its end."""
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    head = f"m{-7 * dx - 4 * dy} {-7 * dy - 4 * dx} L{x1} {y1} L{x1 - 7 * dx + 4 * dy} {y1 - 7 * dy + 4 * dx}"
    return f'<path class="line" d="M{" L".join(f"{x} {y}" for x, y in points)} {head}"/>'


def dashed(x: float, y: float, height: float) -> str:
    """A dashed vertical line."""
    return f'<path class="line" d="M{x} {y} v{height}" stroke-dasharray="3 3"/>'


def step() -> str:
    """One step on two replicas."""
    left, top, row = 92, 58, 92
    parts = [text(left, 26, "One step, two replicas: gradients travel in buckets while the backward pass still runs")]
    parts += [dashed(left + 308 + 96 * number, top + 56, row - 20) for number in range(3)]
    for replica, samples in enumerate(("samples 0-31", "samples 32-63")):
        y = top + replica * row
        parts += [
            text(8, y + 20, f"replica {replica}"),
            box("forward", left, y, 176, f"forward, {samples}"),
            box("backward", left + 180, y, 300, "backward"),
            box("step", left + 552, y, 104, "same step"),
            *(box("bucket", left + 262 + 96 * number, y + 36, 92, f"bucket {number}", 20) for number in range(3)),
        ]
    return picture(
        760,
        268,
        "One step on two replicas: forward, backward with buckets of gradients that are exchanged meanwhile, and the "
        "same optimizer step on both",
        *parts,
        arrow((left, 228), (746, 228)),
        text(716, 248, "time", "small"),
        text(left, 248, "each bucket becomes the mean over all replicas' samples, so both take the same step", "small"),
    )


def buckets() -> str:
    """What overlapping saves."""
    left = 12
    return picture(
        760,
        300,
        "Above, gradients are exchanged after the backward pass; below, in buckets while it runs, and the step ends "
        "earlier",
        text(left, 24, "Exchanged after the backward pass", "strong"),
        box("forward", left, 36, 150, "forward"),
        box("backward", left + 154, 36, 300, "backward"),
        box("bucket", left + 458, 36, 200, "all gradients"),
        box("step", left + 662, 36, 72, "step"),
        text(left, 108, "Exchanged in buckets while it runs", "strong"),
        box("forward", left, 120, 150, "forward"),
        box("backward", left + 154, 120, 300, "backward, from the last layer to the first"),
        *(
            box("bucket", left + 154 + start, 158, 62, f"bucket {number}", 22)
            for number, start in enumerate((64, 140, 216, 304))
        ),
        box("step", left + 524, 120, 72, "step"),
        *(
            text(left + 154 + end, 200, words, "small", "middle")
            for end, words in ((70, "last layer"), (216, "layers before"), (335, "first layer"))
        ),
        dashed(left + 596, 100, 70),
        dashed(left + 734, 66, 104),
        arrow((left + 734, 164), (left + 600, 164)),
        text(left + 667, 186, "saved", "small", "middle"),
        arrow((left, 236), (746, 236)),
        text(716, 258, "time", "small"),
        text(left, 258, "A bucket travels as soon as its gradients are there: 1 MiB first, then 25 MiB each.", "small"),
        text(left, 278, "Only what is still on its way when the backward pass ends makes the step longer.", "small"),
    )


def epoch() -> str:
    """An epoch, its global batches and shares."""
    left, width, parts = 96, 640, []
    parts.append(text(left, 24, "250 samples, global_batch_size=64: the same four steps on any number of ranks"))
    starts = [0, 64, 128, 192, 250]

    def scaled(sample: float) -> float:
        return round(left + width * sample / 250, 1)

    parts += [text(8, 60, "epoch"), box("idle", left, 40, width, "", 30)]
    parts.append(text(left + width / 2, 60, "all samples once, in an order computed from (seed, epoch)", "", "middle"))
    parts.append(text(8, 110, "steps"))
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        words = f"step {number}: {end - begin} samples"
        parts.append(box("forward", scaled(begin) + 1, 90, scaled(end) - scaled(begin) - 2, words))
    for row, ranks in enumerate((2, 4)):
        y = 140 + 50 * row
        parts.append(text(8, y + 20, f"{ranks} ranks"))
        for begin, end in itertools.pairwise(starts):
            short, longer = divmod(end - begin, ranks)
            at = begin
            for rank in range(ranks):
                share = short + (rank < longer)
                words = f"rank {rank}: {share}" if ranks == 2 else str(share)
                kind = ("backward", "bucket", "step", "forward")[rank]
                parts.append(box(kind, scaled(at) + 1, y, scaled(at + share) - scaled(at) - 2, words))
                at += share
    parts.append(
        text(left, 266, "Shares differ by one sample at most; weight=len(x) makes each sample count once.", "small")
    )
    return picture(
        760, 284, "An epoch cut into global batches, and each of them into shares of two and four ranks", *parts
    )


def checkpoint() -> str:
    """The life of a checkpoint."""
    left = 124
    rows = ("loop", "writer thread", "rank 0", "on disk")
    return picture(
        760,
        300,
        "The life of a checkpoint: the loop copies and goes on; a thread writes and syncs; the manifest comes last",
        text(left, 24, "checkpoint.step() blocks for a copy to memory; the rest happens while training goes on"),
        *(text(8, 64 + 50 * number, words) for number, words in enumerate(rows)),
        *(box("forward", left + 94 * n + (62 if n > 1 else 0), 44, 90, f"step {n + 29}") for n in range(6)),
        box("bucket", left + 188, 44, 58, "copy"),
        arrow((left + 217, 76), (left + 217, 92)),
        box("bucket", left + 217, 94, 176, "write files, sync"),
        arrow((left + 393, 109), (left + 420, 109), (left + 420, 142)),
        box("step", left + 420, 144, 100, "manifest"),
        box("idle", left, 194, 214),
        text(left + 107, 214, "step-0000020 is the newest", "small", "middle"),
        box("idle", left + 217, 194, 302),
        text(left + 368, 214, "no manifest yet; step-0000020 is still the newest", "small", "middle"),
        box("step", left + 522, 194, 108, "step-0000030"),
        dashed(left + 521, 176, 60),
        text(
            left + 630,
            252,
            "a kill before this instant leaves the old checkpoint, after it the new one",
            "small",
            "end",
        ),
        text(
            left,
            280,
            "Each rank writes a part. Every file is synced before the manifest is put, which comes last.",
            "small",
        ),
    )


def parallelism() -> str:
    """Which kind of parallelism a model needs."""
    questions = (
        (
            ("Everything fits on one device", "parameters, gradients, optimizer, activations"),
            "DistributedDataParallel",
            "the whole model on each rank",
        ),
        (
            ("... with 1/N of the optimizer state", "N ranks"),
            "ShardedOptimizer",
            "as much traffic, less memory and work",
        ),
        (
            ("... with 1/N of the gradients, too",),
            "ShardedOptimizer, gradients too",
            "shard_gradients=True; parameters are still whole",
        ),
        (
            ("... with 1/N of the parameters, too", "and one layer whole at a time"),
            "torch's FSDP2: fully_shard",
            "more traffic: layers are gathered",
        ),
    )
    parts = []
    for number, (asks, name, why) in enumerate(questions):
        y = 16 + 92 * number
        parts += [
            frame(12, y, 320, 60, *asks),
            arrow((332, y + 30), (420, y + 30)),
            text(372, y + 22, "yes", "small", "middle"),
            frame(424, y, 324, 60, name, why),
            arrow((172, y + 60), (172, y + 90)),
            text(182, y + 80, "no", "small"),
        ]
    y = 16 + 92 * len(questions)
    parts.append(
        frame(
            12,
            y,
            736,
            60,
            "Tensor parallelism inside a node, FSDP2 or DistributedDataParallel between nodes",
            "one layer is too large for a device, or a rank would get less than one sample",
        )
    )
    return picture(
        760, y + 76, "Which kind of parallelism: the first question that is answered with yes decides", *parts
    )


FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (step, buckets, epoch, checkpoint, parallelism)
}

if __name__ == "__main__":
    for figure, draw in FIGURES.items():
        (HERE / f"{figure}.svg").write_text(draw())
