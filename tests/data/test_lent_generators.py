"""What a checkpoint holds of the generators of this process while, and after, they were lent."""

import threading

import pytest
import torch

from evenstep.data import GeneratorStates
from evenstep.data.generators import DEFAULTS, BorrowedGenerators, same_state


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
