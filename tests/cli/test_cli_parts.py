"""Unit tests for parts of the command line."""

import io
import logging
import re
import signal
import sys
import threading
import warnings

import pytest
from rich.console import Console

from evenstep.cli.options.training import spell_options
from evenstep.cli.terminal.display import Display, LiveDisplay, broken_rows, draw
from evenstep.cli.terminal.loading import loading
from evenstep.cli.terminal.output import fields_table, numbers_table, print_table
from evenstep.cli.terminal.progress import Goal, Progress
from evenstep.cli.training.notes import notes_on_stderr
from evenstep.cli.training.stop import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def signals_as_in_a_shell():
    """Ctrl-C is ignored in background jobs; restore the handler of a foreground command."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_waits_for_check_and_a_second_one_does_not(number):
    with StopRequest() as stop:
        stop.check()
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_the_first_signal_is_said_once_and_remembered():
    said = []
    with StopRequest(lambda: said.append("stopping"), same_signal_s=60) as stop:
        assert (stop.number, said) == (signal.SIGINT, [])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert (stop.number, said) == (signal.SIGTERM, ["stopping"])


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert before != [signal.getsignal(number) for number in SIGNALS]
    assert before == [signal.getsignal(number) for number in SIGNALS]


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        stop.check()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_outside_the_main_thread_signals_are_left_alone():
    errors = []

    def use():
        try:
            with StopRequest() as stop:
                stop.check()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []


def progress(*, first_step=0, devices=("cpu:0", "cpu:1")):
    goal = Goal(first_step=first_step, steps=9, epoch_steps=4, epoch_examples=35, devices=devices)
    return Progress(goal)


def add(done, *, loss=1.0, examples=10, took_s=0.5):
    busy_s = [0.25 * (done.step + 1 - done.goal.first_step)] * len(done.goal.devices)
    done.add(loss=loss, examples=examples, took_s=took_s, busy_s=busy_s)


def test_before_the_first_step_nothing_is_known():
    done = progress()
    assert (done.step, done.epoch, done.left_s) == (0, 0, 0)
    assert done.loss is done.examples_per_s is done.epoch_s is None


def test_the_loss_weighs_each_example_of_the_epoch_once():
    done = progress()
    for loss, examples in ((1.0, 10), (2.0, 10), (3.0, 10), (10.0, 5)):
        add(done, loss=loss, examples=examples)
    assert done.loss == (10 + 20 + 30 + 50) / 35
    assert done.ends_epoch
    add(done, loss=0.5)
    assert done.loss == 0.5
    assert (done.epoch, done.goal.epochs) == (2, 3)


def test_speed_and_time_left_count_from_where_this_process_began():
    done = progress(first_step=5)
    add(done, took_s=1.0)
    add(done, took_s=3.0)
    assert done.examples_per_s == 20 / 4
    assert done.epoch_s == 35 / 5
    assert done.left_s == 2 * 2.0  # steps 8 and 9, at 2 seconds each
    assert done.busy == [0.5 / 4] * 2
    assert (done.step, done.epoch) == (7, 2)


def test_the_view_sums_up_more_devices_than_fit():
    done = progress(devices=tuple(f"cpu:{number}" for number in range(64)))
    add(done)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw(done))
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines if "busy" in line] == [
        *(f"cpu:{number}" for number in range(8)),
        "56",
    ]
    assert lines[-1].rstrip().endswith("50% busy")


@pytest.mark.parametrize(
    ("lengths", "width", "rows"),
    [((0,), 40, 1), ((40,), 40, 1), ((41, 5, 120), 40, 2 + 1 + 3), ((41, 5, 120), 120, 3)],
)
def test_lines_are_broken_into_rows(lengths, width, rows):
    assert broken_rows(lengths, width) == rows


class Screen(io.StringIO):
    """A terminal that breaks its lines again when its width changes, as most terminals do.

    The cursor is always in the last row.

    Attributes:
        width: the number of columns.
        lines: the lines that have been written, each as one string.
    """

    def __init__(self, width):
        super().__init__()
        self.width, self.lines = width, [""]
        self._is_row_erased = False  # the cursor's row is empty, and follows rows of its line

    def isatty(self):
        return True

    def write(self, text):
        for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\x1b[2K":
                self._erase_row()
            elif part == "\x1b[1A":
                self._go_up()
            elif part == "\n":
                self.lines.append("")
            elif part[0] not in "\r\x1b":
                assert not self._is_row_erased
                self.lines[-1] += part
        return len(text)

    def _erase_row(self):
        rows = max(1, -(-len(self.lines[-1]) // self.width))
        self._is_row_erased |= rows > 1
        self.lines[-1] = self.lines[-1][: (rows - 1) * self.width]

    def _go_up(self):
        if not self._is_row_erased:
            assert self.lines.pop() == ""
        self._is_row_erased = False


@pytest.mark.parametrize("widths", [(80, 80, 80), (80, 31, 31), (80, 33, 120), (30, 90, 25)])
def test_the_live_view_survives_a_resize(widths):
    screen = Screen(widths[0])
    console = Console(file=screen, force_terminal=True, color_system=None, legacy_windows=False)
    display, done = LiveDisplay(console), progress()
    with display:
        for width in widths:
            screen.width = console.width = width
            add(done)
            display.say(f"line {done.step}")
            display._redraw(draw(done))
            assert [line for line in screen.lines if line.startswith("line")] == [
                f"line {number}" for number in range(1, done.step + 1)
            ]
            assert sum("busy" in line for line in screen.lines) == 2
            assert sum(line.startswith("epoch") for line in screen.lines) == 1
    assert screen.lines[:-1] == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize(
    ("is_terminal", "kind", "shown"),
    [
        (True, "xterm", "loading torch ...\r\x1b[K"),
        (True, "dumb", ""),
        (False, "xterm", ""),
    ],
)
def test_loading_is_shown_on_a_terminal_alone(is_terminal, kind, shown, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", kind)
    with loading("torch"):
        assert "\x1b" not in screen.getvalue()
    assert screen.getvalue() == shown


def test_a_table_is_neither_cut_nor_broken(capsys):
    fields = [("a", "0" * 64), ("label", "[bold]x[/] :smile:")]
    print_table(Console(width=20), fields_table(fields))
    assert capsys.readouterr().out == "a      " + "0" * 64 + "\nlabel  [bold]x[/] :smile:\n"


def test_numbers_are_aligned_to_the_right_and_lines_end_without_spaces(capsys):
    print_table(
        Console(width=10), numbers_table(["", "busy\nnow", "n"], [["cpu:0", "7%", "1,000"]])
    )
    assert capsys.readouterr().out == "       busy\n        now      n\ncpu:0    7%  1,000\n"


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        ("shards=12 uses them all", "--shards 12 uses them all"),
        ("use max_in_flight=1.", "use --in-flight 1."),
        (
            "got compile=True and batch_norm='sync', but",
            "got --compile and --batch-norm sync, but",
        ),
        ("pass its folder as data_dir", "pass its folder as --data-dir"),
        ("fused=True may be faster; 8 shards", "fused=True may be faster; 8 shards"),
    ],
)
def test_python_arguments_in_messages_are_spelled_as_options(message, spelled):
    assert spell_options(message) == spelled


def test_notes_and_warnings_are_lines_printed_once(capsys, caplog):
    with notes_on_stderr(), warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            logging.getLogger("evenstep").warning("two devices, %s", "one core")
            warnings.warn("could not be removed", stacklevel=1)
    assert capsys.readouterr().err == ("note: two devices, one core\nnote: could not be removed\n")
    assert caplog.records == []  # or whoever listens to the root logger would print them again


class SignalledFile(io.StringIO):
    """A file in whose first write a signal is handled, as in that of a real file."""

    def __init__(self):
        super().__init__()
        self.handler, self._is_writing = None, False

    def write(self, text):
        if self._is_writing:
            raise RuntimeError("reentrant call")  # as io.BufferedWriter
        self._is_writing = True
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        self._is_writing = False
        return super().write(text)


@pytest.mark.parametrize("kind", [Display, LiveDisplay])
def test_a_signal_in_the_middle_of_a_line_is_answered_once_after_it(kind):
    file = SignalledFile()
    with kind(Console(file=file, force_terminal=False, width=80)) as display:
        file.handler = display.say_stopping
        display.say("epoch 1")
        display.say("epoch 2")
    first, second, third = file.getvalue().splitlines()[:3]
    assert (first, third) == ("epoch 1", "epoch 2")
    assert second.startswith("stopping after this step")


def test_without_a_standard_error_nothing_is_shown_while_something_is_loaded(monkeypatch):
    from evenstep.cli.terminal.loading import loading

    monkeypatch.setattr("sys.stderr", None)
    with loading("torch"):
        pass
