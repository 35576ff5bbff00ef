"""The first cause that is named is the one that was planted; without one, nothing is named."""

import pytest

from evenstep.comparison import Cause
from evenstep.comparison.finding import HARMLESS
from recorded_runs import Records

PLANTED = [
    ((1,), (1, "other weights"), Cause.WEIGHTS),
    ((1,), (2, "no sampler"), Cause.SAME_ROWS),
    ((1,), (2, "whole batches"), Cause.MORE_ROWS),
    ((1, "shuffled"), (1, "other order"), Cause.ORDER),
    ((2, "shuffled"), (2, "shuffled", "no epoch"), Cause.SAME_ORDER),
    ((1, "shuffled"), (2, "shuffled"), Cause.ORDER),
    ((1, "odd"), (2, "odd"), Cause.PADDED),
    ((1, "odd"), (1, "odd", "drop last"), Cause.DROPPED),
    ((1,), (1, "other data"), Cause.DATA),
    ((1, "dropout"), (1, "dropout", "evaluation"), Cause.MODES),
    ((1,), (1, "bfloat16"), Cause.PRECISION),
    ((1, "batch norm"), (2, "batch norm"), Cause.BATCH_NORM),
    ((1, "batch norm"), (1, "batch norm", "halved"), Cause.BATCH_NORM),
    ((1, "dropout"), (2, "dropout"), Cause.DROPOUT),
    ((1, "dropout"), (1, "less dropout"), Cause.LAYER),
    ((1,), (1, "less dropout"), Cause.LAYER),
    ((1,), (1, "twice"), Cause.CALLS),
    ((1,), (1, "smoothed"), Cause.LOSS),
    ((2,), (2, "smoothed"), Cause.LOSS),
    ((1, "task", "batch norm"), (2, "task", "batch norm"), Cause.BATCH_NORM),
    ((1, "task"), (2, "task", "whole batches"), Cause.MORE_ROWS),
    ((1, "clipped"), (2, "clipped alone"), Cause.CLIPPED),
    ((1, "task"), (2, "task", "clipped"), Cause.CLIPPED),
    ((1,), (1, "targets given"), Cause.ARGUMENTS),
    ((1,), (1, "temperature"), Cause.KERNEL),
    ((1,), (1, "uneven parts"), Cause.MEAN),
    ((1, "masked"), (2, "masked"), Cause.MEAN),
    ((1,), (2, "uneven parts"), Cause.MEAN),
    ((1,), (1, "frozen"), Cause.PARAMETERS),
    ((1,), (2, "alone"), Cause.NOT_EXCHANGED),
    ((1,), (1, "accumulated"), Cause.SCALE),
    ((1,), (2, "summed"), Cause.SCALE),
    ((1,), (1, "clamped"), Cause.GRADIENTS),
    ((1,), (1, "clipped"), Cause.CLIPPED),
    ((1,), (1, "rate"), Cause.SETTINGS),
    ((1,), (1, "momentum"), Cause.SETTINGS),
    ((1,), (1, "adam"), Cause.SETTINGS),
    ((1,), (1, "clamped weights"), Cause.CHANGED),
    ((1, "float16", "scaler"), (1, "float16", "scaler", "overflow"), Cause.SKIPPED),
    ((1, "two optimizers"), (1, "two optimizers", "other turns"), Cause.TURNS),
    ((1,), (1, "longer"), Cause.LENGTH),
    ((1, "clipped"), (1, "scaler", "clipped"), Cause.CLIPPED),  # without unscale_
    ((1,), (1, "nan"), Cause.DATA),
    ((1,), (1, "double"), Cause.PRECISION),
    ((1,), (1, "swapped weights"), Cause.WEIGHTS),
    ((1, "text"), (1, "text", "halved"), Cause.ARGUMENTS),  # filled up to another length
    ((1, "text", "shuffled"), (1, "text", "other order"), Cause.ORDER),
    ((1, "some masked"), (1, "some masked", "accumulated"), Cause.SCALE),
    ((1,), (2, "times world"), Cause.SCALE),
    ((1, "some masked"), (2, "some masked", "times world"), Cause.SCALE),
    ((1, "time first", "shuffled"), (1, "time first", "other order"), Cause.ORDER),
    ((1, "time first"), (2, "time first", "whole batches"), Cause.MORE_ROWS),
    ((1, "operators"), (1, "operators", "temperature"), Cause.KERNEL),
    ((1, "operators", "batch norm"), (2, "operators", "batch norm"), Cause.BATCH_NORM),
]
LATE = [
    ((1,), (2, "late clipped"), Cause.CLIPPED),
    ((1, "late clipped"), (2,), Cause.CLIPPED),
    ((1, "clipped"), (2, "clipped", "late limit"), Cause.CLIPPED),
    ((1,), (1, "halved", "late signs"), Cause.CLIPPED),
    ((1,), (2, "late halved"), Cause.CHANGED),
    ((1,), (1, "halved", "late twice"), Cause.CALLS),
    ((1,), (2, "late rate"), Cause.SETTINGS),
    ((1,), (2, "late reset"), Cause.UPDATE),
    ((1,), (2, "late temperature"), Cause.KERNEL),
    ((1,), (2, "late bfloat16"), Cause.PRECISION),
    ((1,), (2, "late smoothed"), Cause.LOSS),
    ((1,), (1, "halved", "late divided"), Cause.LOSS),
    ((1,), (2, "by hand", "late alone"), Cause.NOT_EXCHANGED),
    ((1, "dropout"), (1, "dropout", "rounded", "late draw"), Cause.DROPOUT),
]
"""The first update differs by rounding, and the fault begins in a later one."""

ALIKE_ON_TWO = [
    "layer norm", "clipped", "frozen", "unused", "uneven parts", "float16, scaler",
    "float16, scaler, overflow", "two optimizers", "bfloat16", "nan", "masked, counted",
    "clamped weights", "adam", "temperature", "evaluation", "operators", "twice", "task",
    "task, step level", "smoothed", "by name", "text", "double", "some masked, counted",
    "time first", "late clipped", "late reset", "late temperature", "late halved",
]  # fmt: skip
ALIKE = [
    ((1,), (1, "halved")), ((1,), (2,)), ((1,), (2, "by hand")), ((1,), (1, "scaler")),
    ((2,), (2, "by hand")), ((1, "dropout"), (1, "dropout")), ((1,), (1, "compiled")),
    ((2,), (2, "task")), ((1, "targets given"), (1, "by name")),
    ((1, "dropout"), (1, "dropout", "rounded")), ((1, "time first"), (1, "time first", "halved")),
    *(((2, *f), (2, *f)) for f in (("dropout",), ("batch norm",), ("less dropout",),)),
    *(((1, *f.split(", ")), (2, *f.split(", "))) for f in ALIKE_ON_TWO),
]  # fmt: skip
QUICK = {
    Cause.SAME_ROWS, Cause.BATCH_NORM, Cause.MEAN, Cause.SETTINGS, Cause.ORDER, Cause.ARGUMENTS,
    Cause.CLIPPED, Cause.CHANGED, Cause.DROPOUT,
}  # fmt: skip
ALSO_QUICK = [((1, "clipped"), (1, "scaler", "clipped"), Cause.CLIPPED)]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return Records(tmp_path_factory.mktemp("records"))


def cases(planted):
    seen = set()
    for case in planted:
        is_quick = case[-1] in QUICK - seen or case in ALSO_QUICK
        seen.add(case[-1])
        name = " | ".join(f"{one[0]} {' '.join(one[1:])}".strip() for one in case[:2])
        yield pytest.param(*case, id=name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("one", "other", "cause"), [*cases(PLANTED)])
def test_the_planted_fault_is_named(records, one, other, cause):
    finding = records.cause(one, other)
    assert finding.cause is cause, finding
    assert finding.evidence
    assert finding.remedy
    assert records.cause(other, one).cause is cause


@pytest.mark.parametrize(("one", "other", "cause"), [*cases(LATE)])
def test_a_fault_that_begins_behind_rounding_is_named(records, one, other, cause):
    for finding in (records.cause(one, other), records.cause(other, one)):
        assert (finding.cause, finding.step) == (cause, 3), finding
        assert finding.evidence
        assert finding.remedy


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*case, marks=pytest.mark.slow if number > 3 else ())
        for number, case in enumerate(ALIKE)
    ],
)
def test_what_differs_by_rounding_only_is_no_alarm(records, one, other):
    finding = records.cause(one, other)
    assert finding.cause in HARMLESS, finding


@pytest.mark.parametrize("faults", [(), ("batch norm",), ("dropout",)])
def test_a_run_equals_itself_recorded_at_another_level(records, faults):
    finding = records.cause((1, *faults), (1, *faults, "step level"))
    assert finding.cause is Cause.NOTHING, finding


@pytest.mark.parametrize(
    ("one", "other", "line"),
    [
        ((1,), (1, "less dropout"), "it says of itself: p=0.0, inplace=False in "),
        ((1, "dropout"), (1, "less dropout"), "it says of itself: p=0.5, inplace=False in "),
        ((1,), (1, "adam"), "class of group 0 is SGD in "),
        ((1,), (1, "bfloat16"), "autocast: not set in "),
        ((1, "shuffled"), (1, "other order"), "of 32 examples are the same"),
        ((1,), (1, "halved", "late divided"), "one is 2 times the other: look whether"),
        ((1, "text"), (1, "text", "halved"), "gets (32, 8) in "),
        ((1, "text"), (1, "text", "halved"), ", (16, 6) and (16, 8) in "),
        ((1,), (1, "double"), "is float32 in "),
        ((1,), (1, "targets given"), "the model gets tensors of the shapes (32, 1, 6, 6) in "),
    ],
    ids=str,
)
def test_the_evidence_says_what_to_look_at(records, one, other, line):
    evidence = records.cause(one, other).evidence
    assert any(line in seen for seen in evidence), evidence


def test_runs_that_are_no_numbers_any_more_are_equal_and_say_so(records):
    finding = records.cause((1, "nan"), (1, "nan"))
    assert finding.cause is Cause.NOTHING
    assert any("holds NaN or infinity from update " in line for line in finding.follows)
    assert not records.cause((1,), (1, "halved")).follows[1:]
