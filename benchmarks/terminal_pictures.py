"""Records what `evenstep train` and `evenstep verify` show on a terminal, as docs/images/*.svg.

    python benchmarks/terminal_pictures.py           # all
    python benchmarks/terminal_pictures.py terminal_verify

Each command runs in a terminal of its own; the picture shows what stands there at its end. It is as
wide as its longest line, so that letters are as large as possible on a small screen. The model that
`evenstep verify` finds fault with is that of docs/debugging.md.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from evenstep.files import write_file

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
COLUMNS = 80
PROGRAM = re.compile(r"^## On the command line$.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PICTURES = {
    "terminal_identical": "evenstep verify --model lenet --devices 1,2,3",
    "terminal_train": "evenstep train --batch-size 64 --momentum 0.9 --epochs 8",
    "terminal_verify": "evenstep verify --model noisy:NoisyPixels --steps 3 --devices 1,2",
}


def main() -> None:
    """Record each command, or those named on the command line."""
    page = (DOCS / "debugging.md").read_text(encoding="utf-8")
    noisy = PROGRAM.findall(page)[0]
    for name in sys.argv[1:] or PICTURES:
        command = PICTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "noisy.py").write_text(noisy, encoding="utf-8")
            lines = final_lines(run(command, Path(folder)))
        write_file(IMAGES / f"{name}.svg", picture(name, command, lines))
        print(IMAGES / f"{name}.svg")


def run(command: str, folder: Path) -> str:
    """Run a command in a terminal of `COLUMNS` columns and return all that it wrote."""
    place = ["env", "-C", str(folder), "-u", "NO_COLOR"]
    terminal = [f"COLUMNS={COLUMNS}", "LINES=50", "TERM=xterm-256color"]
    blocks = []

    def read(descriptor: int) -> bytes:
        blocks.append(os.read(descriptor, 1 << 16))
        return blocks[-1]

    pty.spawn([*place, *terminal, sys.executable, "-m", *shlex.split(command)], read)
    return b"".join(blocks).decode()


def final_lines(written: str) -> list[str]:
    """Return the lines that stand on the terminal at the end, with their colours.

    Enough of a terminal for rich's live view: lines are erased, and the cursor moves up to them.
    """
    lines = [""]
    row = 0
    for part in CONTROL.findall(written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part in ("\x1b[2K", "\x1b[K"):
            lines[row] = ""
        elif part == "\x1b[1A":
            row = max(0, row - 1)
        elif COLOUR.fullmatch(part) or part[0] not in "\r\x1b":
            lines[row] += part
    while lines and not COLOUR.sub("", lines[-1]):
        lines.pop()
    return lines


def picture(name: str, command: str, lines: list[str]) -> str:
    """Return a terminal with a command and its output, as SVG that loads nothing."""
    shown = [Text.assemble(("$ ", "green"), (command, "bold")), *map(Text.from_ansi, lines)]
    width = min(COLUMNS, max(line.cell_len for line in shown))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in shown:
        console.print(line)
    svg = console.export_svg(title="evenstep", theme=MONOKAI, unique_id=name)
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    main()
