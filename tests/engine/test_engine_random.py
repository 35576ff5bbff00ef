"""Random graphs of tasks over random Vars equal a sequential run, in values and in what raised."""

import random
import time
import zlib
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.engine import Engine, InlineLanes, ThreadLanes
from patience import HUNG_TESTS_ABORT

pytestmark = HUNG_TESTS_ABORT

VARS = 3
_HALF_WRITTEN = -1


class Call(NamedTuple):
    """A task to submit. `takes` counts back from it; `lane` is taken modulo the lanes."""

    takes: list[int]
    reads: set[int]
    writes: set[int]
    fails: str  # "", "before" it has written, or "between" two writes
    where: str  # "", "device" or "copy": a copy of what it takes and reads
    lane: int
    delay_s: float
    wait: str  # "", "handle" or "var": what the front end reads before it goes on


places = st.sets(st.integers(0, VARS - 1), max_size=2)
calls = st.builds(
    Call,
    takes=st.lists(st.integers(1, 6), max_size=3),
    reads=places,
    writes=places,
    fails=st.sampled_from(["", "", "", "", "before", "between"]),
    where=st.sampled_from(["", "", "device", "device", "copy"]),
    lane=st.integers(0, 3),
    delay_s=st.sampled_from([0.0, 0.0, 0.0, 1e-4, 5e-4]),
    wait=st.sampled_from(["", "", "", "", "", "", "handle", "var"]),
)
graphs = st.lists(calls, min_size=1, max_size=14)


class FailedError(Exception):
    """Raised by a task on purpose; two of the same task are equal."""

    def __eq__(self, other):
        return isinstance(other, FailedError) and self.args == other.args

    __hash__ = Exception.__hash__


def work(number, call, taken, read, written, *, pause=time.sleep):
    """What a task does: a number of all that it sees; meanwhile what it writes looks broken."""
    if call.fails == "before":
        raise FailedError(number)
    seen = [*taken.values(), *(value[0] for value in (*read, *written))]
    for value in written:
        value[0] = _HALF_WRITTEN
    pause(call.delay_s)
    if call.fails == "between":
        raise FailedError(number)
    assert [value[0] for value in read] == seen[len(taken) : len(taken) + len(read)]
    made = zlib.crc32(repr((number, seen)).encode())
    for place, value in enumerate(written):
        value[0] = made + place
    return made


class Outcome(NamedTuple):
    """What a waiting caller gets: a value, or the error of the task that failed."""

    value: object = None
    cause: int | None = None


class Sequential:
    """The plain meaning of a graph: one task after the other, in the order of submission."""

    def __init__(self):
        self.values = [[0] for _ in range(VARS)]
        self.causes = [None] * VARS
        self.outcomes = []
        self.unseen = set()

    def submit(self, call, takes):
        number = len(self.outcomes)
        touched = call.reads if call.where == "copy" else call.reads | call.writes
        causes = [self.outcomes[source].cause for source in takes]
        causes += [self.causes[place] for place in touched]
        cause = min((cause for cause in causes if cause is not None), default=None)
        value = None
        if cause is None:
            taken = {source: self.outcomes[source].value for source in takes}
            read = [self.values[place] for place in sorted(call.reads - call.writes)]
            written = [self.values[place] for place in sorted(call.writes)]
            if call.where == "copy":
                read = [list(self.values[place]) for place in sorted(call.reads)]
                value = [list(taken.values()), read]
            else:
                try:
                    value = work(number, call, taken, read, written, pause=lambda _: None)
                except FailedError:
                    cause = number
                    self.unseen.add(number)
        if call.where != "copy":
            for place in call.writes:
                self.causes[place] = cause
        self.outcomes.append(Outcome(value, cause))

    def read(self, number):
        outcome = self.outcomes[number]
        self.unseen.discard(outcome.cause)
        return outcome

    def read_var(self, place):
        self.unseen.discard(self.causes[place])
        value = None if self.causes[place] is not None else list(self.values[place])
        return Outcome(value, self.causes[place])


class Front:
    """The same graph, given to an engine."""

    def __init__(self, engine):
        self.engine = engine
        self.names = [device.name for device in engine.devices]
        self.vars = [engine.Var([0]) for _ in range(VARS)]
        self.handles = []

    def submit(self, call, takes):
        number = len(self.handles)
        taken = {source: self.handles[source] for source in takes}
        read = [self.vars[place] for place in sorted(call.reads - call.writes)]
        written = [self.vars[place] for place in sorted(call.writes)]
        name = self.names[call.lane % len(self.names)]
        if call.where == "copy":
            given = [list(taken.values()), [self.vars[place] for place in sorted(call.reads)]]
            handle = self.engine.copy(given, name)
        else:
            handle = self.engine.submit(
                work,
                *(number, call, taken, read, written),
                writes=written,
                **({call.where: name} if call.where else {}),
            )
        self.handles.append(handle)

    def read(self, number):
        return outcome_of(self.handles[number])

    def read_var(self, place):
        outcome = outcome_of(self.vars[place])
        return outcome._replace(value=outcome.value and list(outcome.value))


def outcome_of(pending):
    try:
        return Outcome(pending.result())
    except FailedError as error:
        return Outcome(None, error.args[0])


def check(graph, *, lanes, count, max_in_flight, order):
    """Run a graph both ways; read some results meanwhile, and some at the end in any order."""
    expected = Sequential()
    engine = Engine(count, max_in_flight=max_in_flight, lanes=lanes)
    late = None
    try:
        with engine:
            front = Front(engine)
            for number, call in enumerate(graph):
                takes = list(dict.fromkeys(number - back for back in call.takes if back <= number))
                if call.where == "copy":
                    del takes[1:]  # copies of copies must not grow too fast
                expected.submit(call, takes)
                front.submit(call, takes)
                if call.wait == "handle":
                    assert front.read(number) == expected.read(number)
                elif call.wait == "var":
                    assert front.read_var(call.lane % VARS) == expected.read_var(call.lane % VARS)
            numbers = list(range(len(graph)))
            order.shuffle(numbers)
            for number in numbers[: order.randrange(len(graph) + 1)]:
                assert front.read(number) == expected.read(number)
    except FailedError as error:
        late = error.args[0]
    assert late == min(expected.unseen, default=None)
    assert engine.scheduler.graph.unfinished == 0
    for number in range(len(graph)):
        assert front.read(number) == expected.read(number)
    for place in range(VARS):
        assert front.read_var(place) == expected.read_var(place)
    ran = sum(1 for _ in engine.trace.spans)
    assert ran == sum(outcome.cause in (None, n) for n, outcome in enumerate(expected.outcomes))


a_run = given(
    graph=graphs,
    count=st.integers(1, 4),
    max_in_flight=st.sampled_from([None, None, 1, 3]),
    order=st.randoms(use_true_random=False),
)
steady = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


# The exhaustive test below takes more of them.
@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
@a_run
@settings(steady, max_examples=60)
def test_random_graphs_equal_a_sequential_run(lanes, graph, count, max_in_flight, order):
    check(graph, lanes=lanes, count=count, max_in_flight=max_in_flight, order=order)


@pytest.mark.exhaustive
@pytest.mark.timeout(600, method="thread")
@a_run
@settings(steady, max_examples=10_000)
def test_ten_thousand_random_graphs_equal_a_sequential_run(graph, count, max_in_flight, order):
    check(graph, lanes=ThreadLanes, count=count, max_in_flight=max_in_flight, order=order)


def test_one_large_graph_equals_a_sequential_run():
    """Three thousand tasks: queues that are long, and no waits between."""
    dice = random.Random(5)
    graph = [
        Call(
            takes=[dice.randint(1, 40) for _ in range(dice.randrange(3))],
            reads=set(dice.sample(range(VARS), dice.randrange(2))),
            writes=set(dice.sample(range(VARS), dice.randrange(2)))
            if dice.random() < 0.3
            else set(),
            fails="",
            where=dice.choice(["", "device", "copy"]),
            lane=dice.randrange(4),
            delay_s=0.0,
            wait="",
        )
        for _ in range(3000)
    ]
    check(graph, lanes=ThreadLanes, count=4, max_in_flight=None, order=dice)
