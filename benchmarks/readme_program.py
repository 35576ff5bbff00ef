"""Print the program of the README, with fewer epochs: `python benchmarks/readme_program.py`."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
EPOCHS = 2


def program(sign: str = "+", epochs: int = EPOCHS) -> str:
    """Return one side of the README's diff, for this number of epochs.

    Args:
        sign: "+" for the program with evenstep, "-" for the plain loop.
        epochs: the number of epochs.
    """
    (diff,) = re.findall(
        r"^```diff\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign)]
    text, changed = re.subn(r"range\(\d+\)", f"range({epochs})", "\n".join(lines))
    assert changed == 1
    return text + "\n"


if __name__ == "__main__":
    print(program(), end="")
