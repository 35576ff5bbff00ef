"""Logs a training into a folder: TensorBoard event files, and a CSV with a row for each step."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from evenstep.callbacks.callback import Callback, SaveRecord, StepRecord
from evenstep.callbacks.table import Row, Table
from evenstep.errors import InputError, SaveError

logger = logging.getLogger("evenstep")

_FLUSH_EVERY = 100  # steps


class RunLog(Callback):
    """Logs loss, learning rate, gradient norm, examples a second and each device's busy share.

        log = evenstep.callbacks.RunLog("runs/a")
        with evenstep.Trainer(model, optimizer, loss, callbacks=[log]) as trainer:
            ...

    Outputs of a step that are single numbers are logged under their names. `runs/a/log.csv` gets
    a row as soon as a step has ended. A training that resumes into the same folder continues the
    log: entries after the checkpoint's step are dropped, so that no step is missing or logged
    twice. If the disk becomes full, a log line says so, and training continues without a log.
    Logging a step takes about 0.2 ms in TensorBoard's library, and 0.01 ms in the CSV file.

    Args:
        folder: the folder; created if it doesn't exist.
        overwrite: whether a training that begins at step 0 may drop the log of an earlier one.
        tensorboard: whether to write event files too. They need `pip install
            evenstep[tensorboard]`.
    """

    grad_norm = True

    def __init__(
        self, folder: str | Path, *, overwrite: bool = False, tensorboard: bool = True
    ) -> None:
        self._folder = Path(folder)
        self._overwrite = overwrite
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise InputError(
                "a log for TensorBoard needs a library that is not installed: "
                "pip install evenstep[tensorboard]"
            )
        self._tensorboard = tensorboard
        self._table: Table | None = None
        self._events: Any = None

    def open(self, step: int) -> None:
        """Open the files, and drop their entries after `step`.

        Raises:
            SaveError: the folder can't be written.
            InputError: it has the log of a different training, or the log is open already.
        """
        if self._table is not None:
            raise InputError(
                f"the log in {self._folder} is open already: give each trainer a RunLog of its own"
            )
        try:
            self._open(step)
        except (OSError, UnicodeError) as error:  # TensorBoard's names of files are UTF-8
            self.close()
            reason = getattr(error, "strerror", None) or error
            raise SaveError(
                f"the log in {str(self._folder)!r} could not be written ({reason}), and "
                f"nothing was trained: choose a folder that can be written"
            ) from error
        except InputError:
            self.close()
            raise

    def on_step(self, record: StepRecord) -> None:
        """Log a step."""
        self.add(
            record.step,
            {
                "epoch": record.epoch,
                "loss": record.loss,
                "lr": record.lr,
                **{f"lr/{number}": lr for number, lr in enumerate(record.lrs[1:], 1)},
                "examples_per_s": record.examples_per_s,
                **{f"busy/{device}": share for device, share in record.busy.items()},
                **_numbers(record.outputs),
            },
        )
        if self._events is not None and record.step % _FLUSH_EVERY == 0:
            self._guarded(self._events.flush)

    def on_save(self, record: SaveRecord) -> None:
        """Show TensorBoard what was logged so far."""
        if self._events is not None:
            self._guarded(self._events.flush)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of your own, such as an accuracy, at the last step or a later one."""
        table = self._table
        if table is None:
            return
        if step < table.last_step:
            raise InputError(
                f"got step={step}, but the log has step {table.last_step} already: log in the "
                f"order of the steps"
            )
        self._guarded(lambda: table.put(step, values))
        if self._events is not None:
            self._guarded(lambda: self._add_event(step, values))

    def close(self) -> None:
        """Close the files."""
        events, table = self._events, self._table
        self._events = self._table = None
        for one in (events, table):
            if one is not None:
                self._guarded(one.close)

    def _open(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._table = table = Table(self._folder / "log.csv")
        if table.last_step and not step and not self._overwrite:
            raise InputError(
                f"{self._folder} already has the log of a training, up to step "
                f"{table.last_step}: choose a different folder, or resume that training"
            )
        table.drop_from(step + 1)
        if self._tensorboard:
            self._open_events(table, step)

    def _open_events(self, table: Table, step: int) -> None:
        """Begin an event file that continues the earlier ones.

        Events are flushed at every hundredth step. Those that a killed process may not have flushed
        are written again, from the table.
        """
        from torch.utils.tensorboard import SummaryWriter

        rows = [*table.rows(step // _FLUSH_EVERY * _FLUSH_EVERY)]
        purge_step = rows[0][0] if rows else step + 1
        _wait_for_another_second(self._folder)
        self._events = SummaryWriter(str(self._folder), purge_step=purge_step)
        for number, row in rows:
            self._add_event(number, row)
        self._events.flush()

    def _add_event(self, step: int, values: Row | Mapping[str, float]) -> None:
        """Write all values as one event: an event for each would take a step's time."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._events.file_writer.add_summary(Summary(value=numbers), step)

    def _guarded(self, write: Callable[[], object]) -> None:
        """Write; if the disk does not take it, say so and stop to log."""
        try:
            write()
        except OSError as error:
            logger.warning(
                "the log in %s could not be written (%s): training continues without it",
                self._folder,
                error.strerror or error,
            )
            self.close()


def _wait_for_another_second(folder: Path) -> None:
    """Wait until a new event file's name comes after those of the files that are there.

    TensorBoard reads event files in the order of their names, which begin with the second; within
    one second the order is not that of their making ("10" comes before "9").
    """
    names = [file.name.split(".") for file in folder.glob("events.out.tfevents.*")]
    seconds = {int(name[3]) for name in names if name[3].isdecimal()}
    while int(time.time()) in seconds:
        time.sleep(0.01)


def _numbers(outputs: Mapping[str, Any]) -> Row:
    """Return the outputs that are single numbers."""
    found = {}
    for name, value in outputs.items():
        if isinstance(value, int | float) or (
            isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        ):
            own = name in ("step", "epoch", "loss", "lr", "examples_per_s")
            found[f"outputs/{name}" if own else " ".join(name.split())] = float(value)
    return found
