"""Draw docs/images/architecture.svg: one step, with the two hops of gradients and weights.

python docs/site/architecture.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "images" / "architecture.svg"
sys.path.insert(0, str(ROOT))

from sdp4bit.config import SDP4BitConfig  # noqa: E402

WIDTH, HEIGHT = 720, 590
BOX, LEFT, RIGHT = 320, 180, 540
"""Width of a box, and the centers of the two columns."""
STYLE = """
text { font: 19px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: #1d2430; }
.bold { font-weight: 600; }
.faint { font-size: 17px; fill: #4a5566; }
.box { fill: #ffffff; stroke: #5d6878; stroke-width: 1.5; }
.node { fill: #d9efe1; }
.link { fill: #fbe0cc; }
.arrow { stroke: #1d2430; stroke-width: 2.5; marker-end: url(#head); }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="5" markerHeight="5" orient="auto">'
)
HEAD += '<path d="M0 0 L10 5 L0 10 z" fill="#1d2430"/></marker>'


def picture() -> str:
    """Return the SVG; its bits are those of the default configuration."""
    config = SDP4BitConfig()
    assert config.weights is not None and config.gradients is not None
    inside, between = config.gradients.intra_bits, config.gradients.inter_bits
    lines = [
        *_text(LEFT, 34, "Gradients, after backward", style="bold"),
        *_text(RIGHT, 34, "Weights, before forward", style="bold"),
        *_box(LEFT, 50, "Gradients of this rank", "fp32 or bf16"),
        *_box(RIGHT, 50, "Weights of all ranks", "bf16"),
        *_band(
            118, "node", "Inside a node", "NVLink or PCIe",
            (f"{inside} bits,", "Hadamard"), ("bf16, by", "FSDP2"),
        ),
        *_box(LEFT, 206, "Sum over the node's ranks", "transformed"),
        *_box(RIGHT, 206, "Replica += difference", "the same bits on all ranks"),
        *_band(
            274, "link", "Between nodes", "the slow link",
            (f"{between} bits,", "dither"), (f"{config.weights.bits} bits", ""),
        ),
        *_box(LEFT, 362, "Gradient of the shard", "fp32"),
        *_box(RIGHT, 362, "Main weights − replica", "the difference, in fp32"),
        f'<rect class="box" x="20" y="460" width="{WIDTH - 40}" height="60" rx="8"/>',
        *_text(WIDTH // 2, 484, "Optimizer step on the shard", style="bold"),
        *_text(WIDTH // 2, 508, "fp32 weights and states, as without sdp4bit", style="faint"),
        _arrow(LEFT, 424, 456),
        _arrow(RIGHT, 460, 428),
        *_text(WIDTH // 2, 562, "Between nodes: about 1 byte per parameter. FSDP2 sends 6 or 8."),
    ]  # fmt: skip
    title = "A step with sdp4bit: gradients and weight differences cross the nodes in 4 bits"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<defs>{HEAD}</defs>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#f5f7fa"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _text(x: int, y: int, text: str, *, style: str = "", anchor: str = "middle") -> Iterator[str]:
    if text:
        yield f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _box(x: int, y: int, title: str, below: str) -> Iterator[str]:
    yield f'<rect class="box" x="{x - BOX // 2}" y="{y}" width="{BOX}" height="60" rx="8"/>'
    yield from _text(x, y + 25, title, style="bold")
    yield from _text(x, y + 48, below, style="faint")


def _band(
    y: int, kind: str, title: str, below: str, down: tuple[str, str], up: tuple[str, str]
) -> Iterator[str]:
    """Yield a hop: gradients cross it downwards on the left, weights upwards on the right."""
    yield f'<rect class="{kind}" x="0" y="{y}" width="{WIDTH}" height="80"/>'
    yield from _text(WIDTH // 2, y + 35, title, style="bold")
    yield from _text(WIDTH // 2, y + 60, below, style="faint")
    yield _arrow(LEFT - 60, y - 6, y + 84)
    yield _arrow(RIGHT + 60, y + 86, y - 4)
    for place, line in enumerate(down):
        yield from _text(LEFT - 46, y + 35 + 25 * place, line, anchor="start")
    for place, line in enumerate(up):
        yield from _text(RIGHT + 46, y + 35 + 25 * place, line, anchor="end")


def _arrow(x: int, start: int, end: int) -> str:
    return f'<line class="arrow" x1="{x}" y1="{start}" x2="{x}" y2="{end}"/>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
