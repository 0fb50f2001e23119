"""Draws docs/figures/step.svg: one step on two replicas. Run it from the root: python docs/figures/step.py"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 760, 268
LEFT, TOP, ROW = 92, 58, 92
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #57606a } .in { fill: #fff; font-weight: 600 }
.small { font-size: 12px } .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
.forward { fill: #2f6f9f } .backward { fill: #8a4b9c } .bucket { fill: #bc5a1c } .step { fill: #2d7d46 }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4 } .in { fill: #fff } }
"""


def box(kind: str, x: int, y: int, width: int, text: str, height: int = 30) -> str:
    """A bar with a text in its middle."""
    label = f'<text class="in small" x="{x + width / 2}" y="{y + height / 2 + 4}" text-anchor="middle">{text}</text>'
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>{label}'


def draw() -> str:
    """The picture, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="One step on two replicas: forward, backward with buckets of gradients that are exchanged '
        'meanwhile, and the same optimizer step on both">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="26">One step, two replicas: gradients travel in buckets while the backward pass '
        "still runs</text>",
    ]
    for number in range(3):  # first: bars lie above them
        parts.append(
            f'<path class="line" d="M{LEFT + 308 + 96 * number} {TOP + 56} v{ROW - 20}" stroke-dasharray="3 3"/>'
        )
    for replica, samples in enumerate(("samples 0-31", "samples 32-63")):
        y = TOP + replica * ROW
        parts += [
            f'<text x="8" y="{y + 20}">replica {replica}</text>',
            box("forward", LEFT, y, 176, f"forward, {samples}"),
            box("backward", LEFT + 180, y, 300, "backward"),
            box("step", LEFT + 552, y, 104, "same step"),
            *(box("bucket", LEFT + 262 + 96 * number, y + 36, 92, f"bucket {number}", 20) for number in range(3)),
        ]
    parts += [
        f'<path class="line" d="M{LEFT} {HEIGHT - 40} H{WIDTH - 14} m-7 -4 l7 4 l-7 4"/>',
        f'<text class="small" x="{WIDTH - 44}" y="{HEIGHT - 20}">time</text>',
        f'<text class="small" x="{LEFT}" y="{HEIGHT - 20}">each bucket becomes the mean over the samples of all '
        "replicas, so both take the same step</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
