"""Examples and notebooks in portable arithmetic end with the fingerprints of the table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from portable_program import PROGRAMS, RECORD, digest_of

PAGE = Path(__file__).parents[2] / "docs/portable.md"
RECORDED = json.loads(RECORD.read_text())


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", ["avx2", "plain"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_its_fingerprints_with_other_instructions(program, variant):
    assert digest_of(program, EVENSTEP_PORTABLE=variant) == RECORDED[program]


def test_the_page_has_the_recorded_ones():
    rows = re.findall(
        r"^\| \[(.+?)\]\(.+?\) .*\| (\d+) \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE
    )
    found = {program: f"{count} fingerprints, {digest}" for program, count, digest in rows}
    assert found == RECORDED


def test_a_trainer_that_is_made_inside_is_portable():
    model = nn.Linear(2, 2)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()
    with evenstep.portable():
        assert evenstep.Experiment(shards=3).arithmetic == "portable"
        assert evenstep.Experiment(arithmetic="torch").arithmetic == "torch"
        inside = evenstep.Experiment(shards=3)
        trainer = evenstep.Trainer(*given, shards=5, devices="cpu:0")
    assert trainer.experiment.arithmetic == "portable"
    assert evenstep.Experiment().arithmetic == "torch"
    again = evenstep.Trainer(*given, experiment=inside, seed=1, devices="cpu:0")
    assert again.experiment.arithmetic == "portable"


EVERYTHING = """
import importlib, pkgutil
import evenstep
with evenstep.portable(seed=0):
    for module in pkgutil.walk_packages(evenstep.__path__, "evenstep."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # of an optional dependency
                assert not error.name.startswith("evenstep"), error
"""


def test_all_of_evenstep_can_be_loaded_inside():
    subprocess.run([sys.executable, "-c", EVERYTHING], check=True)
