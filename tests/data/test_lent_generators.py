"""What a checkpoint holds of the generators of this process while, and after, they were lent."""

import contextlib
import itertools
import threading

import pytest
import torch

from evenstep.data import GeneratorStates
from evenstep.data.generators import (
    DEFAULTS,
    BorrowedGenerators,
    call_seeded,
    drew_nothing,
    same_state,
)
from interrupting import OutsideError, thrown_at


def saves_what_is_now():
    now = [generator.read() for generator in DEFAULTS]
    other = GeneratorStates()
    other.load_state_dict(other.state_dict())
    return all(
        same_state(one, generator.read()) for one, generator in zip(now, DEFAULTS, strict=True)
    )


def test_threads_that_lend_them_at_once_leave_nothing_behind():
    one, two = (BorrowedGenerators(DEFAULTS, locked=False) for _ in range(2))
    began, may_end = threading.Event(), threading.Event()

    def waiting():
        began.set()
        assert may_end.wait(60)

    def until_the_other_began():
        thread.start()
        assert began.wait(60)

    one.seed(1)
    two.seed(2)
    thread = threading.Thread(target=one.call, args=(waiting,))
    two.call(until_the_other_began)  # begins before `one`, and ends before it
    may_end.set()
    thread.join()
    torch.rand(1)
    assert saves_what_is_now()


def test_an_interrupt_while_they_are_put_back_leaves_nothing_behind():
    lent = [*DEFAULTS]
    broken = lent[1]._replace(write=lambda state: (_ for _ in ()).throw(KeyboardInterrupt))
    numbers = BorrowedGenerators([lent[0], broken, lent[2]])
    numbers._states = [generator.read() for generator in lent]
    with pytest.raises(KeyboardInterrupt):
        numbers.call(torch.rand, 1)
    torch.rand(1)
    assert saves_what_is_now()


def drawing():
    return [torch.rand(1), *(generator.seed(7) for generator in DEFAULTS)]


def borrowed():
    numbers = BorrowedGenerators(DEFAULTS)
    numbers.seed(3)
    numbers.call(drawing)


@pytest.mark.parametrize(
    "lend",
    [borrowed, lambda: call_seeded(DEFAULTS, 3, drawing), lambda: drew_nothing(DEFAULTS, drawing)],
    ids=["borrowed", "seeded", "watched"],
)
def test_what_is_thrown_anywhere_leaves_the_users_states(lend):
    """One that came while they were put back, or just before, left others in their place."""
    states = [generator.read() for generator in DEFAULTS]
    for place in itertools.count(1):
        with contextlib.suppress(OutsideError), thrown_at(place, ("",)) as passed:
            lend()
        found = [generator.read() for generator in DEFAULTS]
        assert all(map(same_state, found, states)), passed[-1]
        assert saves_what_is_now()
        if len(passed) < place:
            break
    assert place > 20
