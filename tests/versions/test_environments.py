"""One list of versions: what is tested, what `evenstep doctor` names, what pip may choose."""

import json
import re

import pytest
from environments import ENVIRONMENTS, ROOT
from try_all import RESULTS

from evenstep.private_torch.names import TESTED_TORCH


def test_the_tested_versions_have_environments():
    assert [*dict.fromkeys(one.torch for one in ENVIRONMENTS)] == [*TESTED_TORCH]


def test_the_oldest_and_the_newest_torch_get_all_tests_and_the_oldest_dependencies_some():
    assert {one.torch for one in ENVIRONMENTS if one.tests == "all"} == {
        *(TESTED_TORCH[0], TESTED_TORCH[-1])
    }
    oldest = [one.torch for one in ENVIRONMENTS if one.resolution == "lowest-direct"]
    assert oldest == [TESTED_TORCH[0]]


def test_each_python_that_is_checked_elsewhere_has_an_environment():
    workflow = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    pythons = {one.python.removesuffix("t") for one in ENVIRONMENTS}
    assert pythons == set(re.findall(r'"(3\.\d+)"', workflow))


RESUMED = json.loads(RESULTS.read_text("utf-8"))["resumed"]


@pytest.mark.parametrize("writer", RESUMED)
def test_no_version_resumes_another_ones_checkpoint_with_other_bits_unsaid(writer):
    by_reader = RESUMED[writer]
    assert all(found["opens alike"] for found in by_reader.values())
    assert all(found["closes alike"] or found["said"] for found in by_reader.values())
    assert by_reader[writer]["closes alike"]
