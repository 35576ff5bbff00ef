"""Who waits for whom: the hazards of reads and writes, and whom a failure reaches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.engine.graph import Graph, Node, Place


class Tasks:
    """A graph whose nodes have names."""

    def __init__(self):
        self.graph = Graph()
        self.nodes = {}

    def add(self, name, *, takes="", reads=(), writes=()):
        """Return whether the task may begin at once."""
        node = self.nodes[name] = Node()
        ready = self.graph.add(node, [self.nodes[source] for source in takes], reads, writes)
        assert ready in ([], [node])
        return bool(ready)

    def end(self, name, *, failed=False):
        """Return the names of the tasks that wait for nothing now, in order."""
        return self.names(self.graph.end(self.nodes[name], failed=failed))

    def fail(self, name):
        return self.end(name, failed=True)

    def names(self, nodes):
        names = {id(node): name for name, node in self.nodes.items()}
        return "".join(names[id(node)] for node in nodes)

    def cause(self, name):
        cause = self.nodes[name].cause
        return None if cause is None else self.names([cause])


@pytest.fixture
def tasks():
    return Tasks()


# ---- who waits


def test_a_task_waits_for_all_whose_results_it_takes(tasks):
    tasks.add("a")
    tasks.add("b")
    assert not tasks.add("c", takes="abb")
    assert tasks.end("b") == ""
    assert tasks.end("a") == "c"
    assert tasks.add("d", takes="ab")  # they have ended


def test_read_after_write(tasks):
    x = Place()
    tasks.add("w", writes=[x])
    assert not tasks.add("r", reads=[x])
    assert not tasks.add("s", reads=[x])
    assert tasks.end("w") == "rs"


def test_write_after_read(tasks):
    x = Place()
    assert tasks.add("r", reads=[x])
    assert tasks.add("s", reads=[x])
    assert not tasks.add("w", writes=[x])
    assert tasks.end("s") == ""
    assert tasks.end("r") == "w"


def test_write_after_write(tasks):
    x = Place()
    tasks.add("v", writes=[x])
    assert not tasks.add("w", writes=[x])
    assert tasks.end("v") == "w"


def test_readers_run_beside_each_other_between_two_writers(tasks):
    x = Place()
    tasks.add("v", writes=[x])
    tasks.add("r", reads=[x])
    tasks.add("s", reads=[x])
    tasks.add("w", writes=[x])
    tasks.add("t", reads=[x])
    assert tasks.end("v") == "rs"
    assert tasks.end("r") == ""
    assert tasks.end("s") == "w"
    assert tasks.end("w") == "t"


def test_places_are_independent(tasks):
    x, y = Place(), Place()
    tasks.add("v", writes=[x])
    assert tasks.add("w", writes=[y])
    assert not tasks.add("r", reads=[x, y])
    assert tasks.end("v") == ""
    assert tasks.end("w") == "r"


def test_a_task_that_names_a_place_twice_or_reads_what_it_writes_waits_for_others_only(tasks):
    x = Place()
    assert tasks.add("a", reads=[x, x], writes=[x, x])
    assert not tasks.add("b", reads=[x, x])
    assert tasks.end("a") == "b"
    assert not tasks.add("c", takes="b", writes=[x])
    assert tasks.end("b") == "c"


def test_reads_and_writes_may_be_any_iterables(tasks):
    x = Place()
    assert tasks.add("a", reads=(place for place in [x]), writes=(place for place in [x]))
    assert not tasks.add("b", reads=iter([x]), writes=iter([]))
    assert tasks.end("a") == "b"


def test_those_set_free_come_in_the_order_of_submission(tasks):
    x = Place()
    tasks.add("a", reads=[x])
    tasks.add("w", writes=[x])  # waits for the read
    tasks.add("b", takes="a")
    tasks.add("c", takes="a")
    assert tasks.end("a") == "wbc"


def test_a_task_that_has_ended_keeps_no_other(tasks):
    x = Place()
    tasks.add("a", writes=[x])
    tasks.add("b", takes="a", reads=[x])
    tasks.end("a")
    tasks.end("b")
    assert x.writer is None
    assert x.readers == set()
    for node in tasks.nodes.values():
        assert not node.takers
        assert not node.followers


# ---- whom a failure reaches


def test_a_failure_reaches_all_that_need_it_however_far(tasks):
    x = Place()
    tasks.add("a")
    tasks.add("b", takes="a", writes=[x])
    tasks.add("c", reads=[x])
    tasks.add("d", takes="c")
    tasks.add("e")
    assert tasks.fail("a") == "b"
    assert tasks.end("b") == "c"
    assert tasks.end("c") == "d"
    assert [tasks.cause(name) for name in "abcde"] == ["a", "a", "a", "a", None]


# ---- against a plain sequential run

NAMES = range(4)
one_task = st.tuples(
    st.sets(st.integers(0, 11), max_size=2),  # the numbers of tasks whose results it takes
    st.sets(st.sampled_from(NAMES), max_size=2),  # reads
    st.sets(st.sampled_from(NAMES), max_size=2),  # writes
    st.booleans(),  # whether it fails, if it runs
)


@given(st.lists(one_task, max_size=12), st.randoms(use_true_random=False))
def test_in_any_order_of_ends_each_task_sees_what_a_sequential_run_shows_it(tasks, random):
    graph, places, nodes = Graph(), [Place() for _ in NAMES], []
    version, defined = dict.fromkeys(NAMES, -1), dict.fromkeys(NAMES)
    expected, causes = [], []
    for number, (takes, reads, writes, fails) in enumerate(tasks):
        known = [causes[source] for source in takes if source < number]
        known += [defined[name] for name in reads | writes]
        cause = min((cause for cause in known if cause is not None), default=None)
        expected.append({name: version[name] for name in reads | writes})
        causes.append(number if cause is None and fails else cause)
        for name in writes:
            version[name], defined[name] = number, causes[number]
    ready = []
    for number, (takes, reads, writes, _) in enumerate(tasks):
        nodes.append(Node())
        ready += graph.add(
            nodes[-1],
            [nodes[source] for source in takes if source < number],
            [places[name] for name in reads],
            [places[name] for name in writes],
        )
    now, ended = dict.fromkeys(NAMES, -1), []
    while ready:
        node = ready.pop(random.randrange(len(ready)))
        _, reads, writes, fails = tasks[node.number]
        assert {name: now[name] for name in reads | writes} == expected[node.number]
        now.update(dict.fromkeys(writes, node.number))
        ready += graph.end(node, failed=fails and node.cause is None)
        ended.append(node.number)
    assert sorted(ended) == list(range(len(tasks)))
    assert [node.cause and node.cause.number for node in nodes] == causes
    assert [place.cause and place.cause.number for place in places] == list(defined.values())
