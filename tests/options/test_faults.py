"""Limits and checks: what they accept."""

import math

import pytest

from evenstep import Faults
from evenstep.errors import InputError


@pytest.mark.parametrize(
    ("check", "steps"),
    [("first", math.inf), ("off", None), ("every 1", 1), ("every 0100", 100), (" every  7 ", 7)],
)
def test_the_steps_between_two_checks(check, steps):
    assert Faults(check=check).check_interval == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "second"}, 'got check=\'second\': give "first", "off" or "every N"'),
        ({"check": "every 0"}, "got check='every 0'"),
        ({"check": 1}, "got check=1"),
        ({"check_every": 0}, "got check_every=0: give an integer of at least 1"),
        ({"lost_after_s": 0}, "got lost_after_s=0: give a number of seconds above 0"),
        ({"peer_timeout_s": math.inf}, "got peer_timeout_s=inf: .* at most 31,536,000"),
        ({"peer_timeout_s": math.nan}, "got peer_timeout_s=nan"),
        ({"allow_rounding": "yes"}, "got allow_rounding='yes': give True or False"),
    ],
)
def test_other_values_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        Faults(**options)


def test_faults_read_as_they_were_written():
    assert repr(Faults()) == "Faults()"
    assert repr(Faults(lost_after_s=math.inf, check="off")) == (
        "Faults(lost_after_s=inf, check='off')"
    )
