"""The notebooks are what their texts say, hold the outputs of their code, and work."""

import importlib.util
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
TEXTS = sorted((ROOT / "notebooks").glob("*.md"))
MEASURED = re.compile(r"[0-9a-f]{12,}|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def load_command():
    """Import the command that runs the notebooks."""
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMAND = load_command()


def stored(text):
    return nbformat.read(text.with_suffix(".ipynb"), as_version=4)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook):
    return [output for cell in code_of(notebook) for output in cell.outputs]


def pictures_of(notebook):
    return [one for one in outputs_of(notebook) if "image/png" in one.get("data", {})]


def text_of(output):
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def printed(notebook):
    """Return the lines that each cell prints, sorted, with `#` for each number and digest.

    Whether numbers have a place for their sign depends on the processor's random numbers.
    """
    texts = [
        "".join(
            one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs
        )
        for cell in code_of(notebook)
    ]
    return [sorted(MEASURED.sub("#", text).replace(" #", "#").splitlines()) for text in texts]


def test_there_are_eight_in_the_order_of_the_book():
    assert [text.name[0] for text in TEXTS] == list("12345678")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_notebook_is_its_text_with_the_outputs_of_this_code(text):
    """If this fails, run `make notebooks`."""
    notebook = stored(text)
    assert cells(notebook) == cells(jupytext.read(text))
    assert notebook.metadata["code_sha256"] == COMMAND.digest(notebook)
    counts = [cell.execution_count for cell in code_of(notebook)]
    assert counts == [*range(1, len(counts) + 1)]
    assert outputs_of(notebook)
    assert {one.get("name") for one in outputs_of(notebook)} <= {None, "stdout"}
    assert "error" not in {one.output_type for one in outputs_of(notebook)}


def test_the_outputs_of_other_code_would_be_found():
    notebook = stored(TEXTS[0])
    before = COMMAND.digest(notebook)
    code_of(notebook)[0].source += "\nprint(1)"
    assert COMMAND.digest(notebook) != before


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_notebook_opens_what_it_uses_by_with_and_needs_no_magic(text):
    code = "\n".join(cell.source for cell in code_of(stored(text)))
    assert "__enter__" not in code
    assert not re.search(r"^\s*[%!]", code, re.MULTILINE)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_what_draws_has_stored_a_picture(text):
    for cell in code_of(stored(text)):
        draws = "plt.show" in cell.source or re.search(r"= train\(num_devices", cell.source)
        pictures = [one for one in cell.outputs if "image/png" in one.get("data", {})]
        assert len(pictures) == bool(draws), cell.source


def test_the_concise_training_ends_above_95_percent():
    (text,) = (one for one in TEXTS if one.name.startswith("5"))
    ends = re.findall(r"test acc: (\d\.\d+)", str(outputs_of(stored(text))))
    assert len(ends) == 2
    assert min(map(float, ends)) > 0.95
    assert len(set(ends)) == 1


def test_the_notebooks_extra_brings_jupyter():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = " ".join(project["optional-dependencies"]["notebooks"])
    for one in ("jupyterlab", "ipykernel", "matplotlib"):
        assert one in wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_the_command_refuses_a_notebook_that_prints_a_warning(tmp_path):
    text = tmp_path / "warns.md"
    text.write_text("# Title\n\n```python\nimport warnings\nwarnings.warn('old')\n```\n")
    with pytest.raises(RuntimeError, match=r"warns.md, cell 1, prints a warning: .*old"):
        COMMAND.executed(text)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_notebook_works_from_top_to_bottom_and_prints_what_is_stored(text):
    notebook = COMMAND.executed(text)
    assert printed(notebook) == printed(stored(text))
    assert len(pictures_of(notebook)) == len(pictures_of(stored(text)))
