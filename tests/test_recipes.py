"""The programs of docs/recipes.md, run as they stand there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FIRST, *PARTS = SECTION.split(PAGE.read_text(encoding="utf-8"))
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
WITHOUT_PROGRAM = {"Several processes"}
NEEDED = {
    "Hugging Face's Trainer": ("transformers", "accelerate"),
    "Lightning": ("lightning",),
    "Logs, and bars that move": ("tensorboard",),
    "Metrics of torchmetrics": ("torchmetrics",),
}


MARKS = {
    "Lightning": [
        pytest.mark.slow,  # the import of Lightning
        pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    ]
}


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=MARKS.get(title, ()))
        for title in SECTIONS
        if title not in WITHOUT_PROGRAM
    ],
)
def test_a_recipe_runs(title):
    for library in NEEDED.get(title, ()):
        pytest.importorskip(library, reason=f"pip install {library}")
    programs = PROGRAM.findall(FIRST) + PROGRAM.findall(SECTIONS[title])
    assert len(programs) >= 2
    exec("\n".join(programs), {"__name__": "recipe"})
