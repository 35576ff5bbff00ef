"""A CSV file with one row for each step, which can be cut back to any step."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

from evenstep.errors import InputError
from evenstep.files import open_file, write_file

Row: TypeAlias = dict[str, float]

_MOST_LINE_NBYTES = 1 << 20


class Table:
    """Appends rows to a CSV file whose first column is the step. Every row is written at once.

    The file is created with a header if it doesn't exist.

    Attributes:
        last_step: the step of the last row; 0 without rows.

    Raises:
        OSError: the file can't be read, or not be created.
        InputError: it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = ["step"]
        self._last: Row = {}
        self._starts = self._ends = 0  # bytes before the last row, and with it
        if not path.exists():
            write_file(path, "step\n")
        self.last_step = 0
        self._go_to_end(before=None)
        self._file: BinaryIO = path.open("r+b", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the last row if it is of this step, or else append a row."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._widen(new)
        if step != self.last_step:
            self._starts, self._last = self._ends, {}
        self._last = {"step": step, **self._last, **values}
        row = self._encoded_row(self._last, self._columns)
        self._file.seek(self._starts)
        self._file.write(row)
        if self._starts + len(row) < self._ends:  # a value was replaced by a shorter one
            self._file.truncate(self._starts + len(row))
        self._ends, self.last_step = self._starts + len(row), step

    def rows(self, first: int) -> Iterator[tuple[int, Row]]:
        """Yield the steps from `first` on, and their values."""
        for _, row in self._read():
            if row["step"] >= first:
                yield int(row.pop("step")), row

    def drop_from(self, step: int) -> None:
        """Drop the rows from a step on, and a last line that is not whole, in one stroke."""
        self._go_to_end(before=step)
        if self._ends < self._path.stat().st_size:
            os.truncate(self._path, self._ends)

    def _go_to_end(self, before: int | None) -> None:
        """Find the end of the rows before a step."""
        self._starts, self._last, self.last_step = 0, {}, 0
        self._ends = len(self._header())
        for end, row in self._read():
            if before is not None and row["step"] >= before:
                break
            self._starts, self._ends = self._ends, end
            self._last, self.last_step = row, int(row["step"])

    def _header(self) -> bytes:
        with open_file(self._path) as file:
            line = file.readline(_MOST_LINE_NBYTES)
        if not line.endswith(b"\n") or line.strip().split(b",")[0] != b"step":
            raise self._foreign(1)
        self._columns = self._decoded(line, 1)
        return line

    def _read(self) -> Iterator[tuple[int, Row]]:
        """Yield each whole row with the number of bytes up to its end."""
        with open_file(self._path) as file:
            end = len(file.readline(_MOST_LINE_NBYTES))
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_NBYTES), b""), 2):
                if not line.endswith(b"\n"):
                    return  # the process was killed while it wrote, or the disk was full
                cells = zip(self._columns, self._decoded(line, number), strict=False)
                try:
                    row = {name: float(cell) for name, cell in cells if cell}
                    step = int(row["step"])
                except (ValueError, KeyError, OverflowError):
                    raise self._foreign(number) from None
                end += len(line)
                yield end, {**row, "step": step}

    def _widen(self, names: list[str]) -> None:
        """Add columns: the file is written anew, whole or not at all."""
        columns, rows = [*self._columns, *names], self._read()

        def content(file: BinaryIO) -> None:
            file.write(self._encoded(columns))
            file.writelines(self._encoded_row(row, columns) for _, row in rows)

        write_file(self._path, content)
        self._file.close()
        self._go_to_end(before=None)
        self._file = self._path.open("r+b", buffering=0)

    def _encoded_row(self, row: Mapping[str, float], columns: list[str]) -> bytes:
        return self._encoded([_spelled(row.get(name)) for name in columns])

    def _encoded(self, cells: list[str]) -> bytes:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        return line.getvalue().encode()

    def _decoded(self, line: bytes, number: int) -> list[str]:
        try:
            return next(csv.reader([line.decode()]))
        except (UnicodeDecodeError, csv.Error, StopIteration):
            raise self._foreign(number) from None

    def _foreign(self, line: int) -> InputError:
        return InputError(
            f"{self._path} was not written by evenstep (line {line} is not a row of its log): move "
            f"it away, or log to a different folder"
        )


def _spelled(value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
