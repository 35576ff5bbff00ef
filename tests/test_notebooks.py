"""The notebooks are what their texts say, and work from top to bottom."""

from pathlib import Path

import jupytext
import nbformat
import pytest

TEXTS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.md"))


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_six_in_the_order_of_the_book():
    assert [text.name[0] for text in TEXTS] == list("123456")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_notebook_is_its_text_and_holds_no_outputs(text):
    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    assert cells(notebook) == cells(jupytext.read(text))
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_notebook_works_from_top_to_bottom(text, tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert bool(pictures) == any("plt.show" in cell.source for cell in notebook.cells) or (
        "Animator" in text.read_text()
    )
