"""The programs of docs/mxnet.md run from top to bottom, and its claims on names hold."""

import re
from pathlib import Path

from evenstep import mxnet as mx

PAGE = Path(__file__).parents[2] / "docs" / "mxnet.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_from_top_to_bottom(capsys):
    code = "\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    names = {"__name__": "page"}
    exec(compile(code, "<mxnet.md>", "exec"), names)
    shown = capsys.readouterr().out
    assert 0 < float(shown.splitlines()[0]) < 1.5
    assert "nd.Embedding, queued at <mxnet.md>:" in shown
    assert re.search(r"^[0-9a-f]{64}$", shown, re.MULTILINE)


def test_the_names_of_the_page_are_there():
    rows = re.findall(r"^\| (`.*?) \| (`.*|arrays.*|the same.*|initial.*|the names.*) \|$",
                      PAGE.read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    table = {module.strip("`"): set(re.findall(r"`(\w+)`", names)) for module, names in rows}
    for module in ("mx", "autograd", "gluon"):
        place = mx if module == "mx" else getattr(mx, module)
        assert len(table[module]) >= 8
        for name in table[module] - {"with", "ArrayDataset", "DataLoader"}:
            assert hasattr(place, name), name
    assert 160 <= len(dir(mx.nd)) <= 190
