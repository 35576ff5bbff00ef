"""The programs of docs/recipes.md and of the other how-to pages, run as they stand there.

A section's programs continue the lines of docs/how_to.md, and those before the first section.
"""

import logging
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("recipes", "layouts", "gpus", "loaders", "hugging_face", "lightning", "logging")
BEGINNING = "how_to.md#how-the-programs-begin"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = {
    "The Trainer of transformers": ("transformers", "accelerate"),
    "A loop of your own": ("transformers",),
    "A strategy for Lightning's Trainer": ("lightning",),
    "Losses and rates, to any library": ("tensorboard",),
    "Metrics of torchmetrics": ("torchmetrics",),
}
MARKS = {
    "A strategy for Lightning's Trainer": [
        pytest.mark.slow,  # the import of Lightning
        pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    ],
    "A loop of your own": [pytest.mark.slow],  # the import of transformers
    "The Trainer of transformers": [pytest.mark.slow],
}


def sections(page):
    """Return the programs before the first section, and those of each section."""
    first, *parts = SECTION.split((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    return PROGRAM.findall(first), {name: PROGRAM.findall(text) for name, text in texts.items()}


(SHARED,) = sections("how_to")[1]["How the programs begin"]


CASES = [
    pytest.param(opening, programs, id=f"{page}: {title}", marks=MARKS.get(title, ()))
    for page in PAGES
    for opening, titles in [sections(page)]
    for title, programs in titles.items()
    if programs
]


def test_every_page_has_programs():
    assert {case.id.partition(":")[0] for case in CASES} == set(PAGES)
    assert len(CASES) >= 30


@pytest.mark.parametrize("page", PAGES)
def test_a_page_points_to_the_lines_that_its_programs_continue(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    before, _, _ = text.partition("```python")
    assert BEGINNING in before
    assert not [line for line in SHARED.splitlines() if line.startswith("def ") and line in text]


@pytest.fixture
def _settings(monkeypatch):
    """Put back what a page sets for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    logger = logging.getLogger("evenstep")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize(("opening", "programs"), CASES)
def test_a_section_runs(opening, programs, request):
    title = request.node.callspec.id.partition(": ")[2]
    for library in NEEDED.get(title, ()):
        pytest.importorskip(library, reason=f"pip install {library}")
    exec("\n".join([SHARED, *opening, *programs]), {"__name__": "recipe"})
