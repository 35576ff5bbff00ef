"""Runs the notebooks and stores them with their outputs: `make notebooks`.

    python notebooks/execute.py              # all of them
    python notebooks/execute.py 2_asynchronous

A notebook's text is the Markdown file of its name. The command makes a notebook of it, runs it from
top to bottom in a fresh kernel, and writes the .ipynb file with the outputs, and with a digest of
the code that printed them.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def digest(notebook: nbformat.NotebookNode) -> str:
    """Return a digest of a notebook's code."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def executed(text: Path, timeout_s: float = 600) -> nbformat.NotebookNode:
    """Return the notebook of a text with its outputs.

    Raises:
        RuntimeError: a cell prints a warning.
        CellExecutionError: a cell fails.
    """
    notebook = jupytext.read(text)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=timeout_s, resources=resources, coalesce_streams=True
        ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        warnings = [one.text for one in cell.get("outputs", ()) if one.get("name") == "stderr"]
        if warnings:
            raise RuntimeError(f"{text.name}, cell {number}, prints a warning: {warnings[0]}")
    notebook.metadata = {"kernelspec": KERNEL, "code_sha256": digest(notebook)}
    return notebook


def main(names: list[str]) -> None:
    """Run and store the notebooks of these names, or all."""
    for text in sorted(HERE.glob("*.md")):
        if not names or text.stem in names:
            notebook = executed(text)
            nbformat.validate(notebook)
            nbformat.write(notebook, text.with_suffix(".ipynb"))
            print(text.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
