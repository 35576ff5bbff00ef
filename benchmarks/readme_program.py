"""Print the program of the README, with fewer epochs: `python benchmarks/readme_program.py`."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
EPOCHS = 2


def program(epochs: int = EPOCHS) -> str:
    """Return the README's program, for this number of epochs."""
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    text, changed = re.subn(r"range\(\d+\)", f"range({epochs})", block)
    assert changed == 1
    return text


if __name__ == "__main__":
    print(program(), end="")
