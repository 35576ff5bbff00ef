"""Draws docs/images/shards.svg: the shards of a batch on 1, 2 and 3 devices, and their one tree.

    python docs/_site/shards_picture.py

The picture is animated by CSS, so that it moves in a README, too. Three layouts follow each other;
who asks for less motion sees the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SHARDS = 8
LAYOUTS = ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2))
"""The device of each shard, for 1, 2 and 3 devices."""
COLOURS = ("#3f51b5", "#00897b", "#f4801f")
LEFT, STEP, SIDE, TOP = 60, 80, 44, 64
SECONDS = 4  # of a layout
WIDTH, HEIGHT = 2 * LEFT + STEP * (SHARDS - 1), 372
PICTURE = Path(__file__).parents[1] / "images" / "shards.svg"


def main() -> None:
    """Write the picture."""
    PICTURE.write_text("\n".join(drawn()) + "\n", encoding="utf-8")


def drawn() -> Iterator[str]:
    """Yield the lines of the picture."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="15" text-anchor="middle">'
    )
    yield "<title>Eight shards on 1, 2 and 3 devices, summed in one tree: the same sum</title>"
    yield from style()
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>'
    yield f'<text x="{WIDTH / 2}" y="28" fill="#333">a batch, cut into 8 shards</text>'
    yield from tree()
    for number, devices in enumerate(LAYOUTS):
        yield f'<g class="layout" style="animation-delay:{number * SECONDS}s">'
        for shard, device in enumerate(devices):
            yield (
                f'<rect x="{x_of(shard) - SIDE / 2}" y="{TOP - 20}" width="{SIDE}" '
                f'height="{SIDE}" rx="6" fill="{COLOURS[device]}"/>'
            )
            yield f'<text x="{x_of(shard)}" y="{TOP + 7}" fill="#fff">{shard}</text>'
        count = len(set(devices))
        for device in range(count):
            x = WIDTH / 2 + (device - (count - 1) / 2) * 130
            yield f'<circle cx="{x - 38}" cy="{HEIGHT - 25}" r="8" fill="{COLOURS[device]}"/>'
            yield f'<text x="{x + 12}" y="{HEIGHT - 20}" fill="#333">device {device}</text>'
        yield "</g>"
    yield f'<text x="{WIDTH / 2 + 100}" y="{y_of(3) + 5}" fill="#333">the same bits</text>'
    yield "</svg>"


def style() -> Iterator[str]:
    """Yield the animation: one layout at a time."""
    whole, shown = len(LAYOUTS) * SECONDS, 100 / len(LAYOUTS)
    yield "<style>"
    yield f".layout {{ opacity: 0; animation: turn {whole}s infinite }}"
    yield f"@keyframes turn {{ 0%, {shown - 4:.1f}% {{ opacity: 1 }}"
    yield f"  {shown:.1f}%, 96% {{ opacity: 0 }} }}"
    yield "@media (prefers-reduced-motion) { .layout { animation: none } "
    yield ".layout:first-of-type { opacity: 1 } }"
    yield "</style>"


def tree() -> Iterator[str]:
    """Yield the lines and the nodes of the tree."""
    nodes = [*nodes_of(0, SHARDS)]
    for lo, hi in nodes:
        to_x, to_y = place(lo, hi)
        for start, end in ((lo, (lo + hi) // 2), ((lo + hi) // 2, hi)):
            x, y = place(start, end)
            yield f'<path d="M{x} {y} L{to_x} {to_y}" stroke="#888" stroke-width="2"/>'
    for lo, hi in nodes:
        x, y = place(lo, hi)
        yield f'<circle cx="{x}" cy="{y}" r="15" fill="#fff" stroke="#555" stroke-width="2"/>'
        yield f'<text x="{x}" y="{y + 5}" fill="#333">+</text>'


def nodes_of(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Yield the nodes that add, over shards [lo, hi)."""
    if hi - lo > 1:
        yield lo, hi
        yield from nodes_of(lo, (lo + hi) // 2)
        yield from nodes_of((lo + hi) // 2, hi)


def place(lo: int, hi: int) -> tuple[float, float]:
    """Return where the node of shards [lo, hi) is drawn."""
    return (x_of(lo) + x_of(hi - 1)) / 2, y_of((hi - lo).bit_length() - 1)


def x_of(shard: int) -> float:
    """Return the middle of a shard."""
    return LEFT + STEP * shard


def y_of(level: int) -> float:
    """Return the height of a level of the tree; 0 for shards."""
    return TOP + 78 * level


if __name__ == "__main__":
    main()
