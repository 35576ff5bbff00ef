"""Programs on a terminal: what they have written, and what stands on the screen."""

import fcntl
import os
import pty
import struct
import termios

from warm import Job


def on_a_terminal(program, columns=100, rows=60):
    """Run a program's text with its output on a terminal; return (exit status, output)."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    environment.pop("COLUMNS", None)
    job = Job("-c", program, env=environment, shown_on=side)
    os.close(side)
    written = read_all(terminal).decode()
    job.communicate(60)
    return job.returncode, written


def read_all(terminal):
    """Read until the other side is closed, which Linux reports as an error."""
    blocks = []
    while True:
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:
            block = b""
        if not block:
            os.close(terminal)
            return b"".join(blocks)
        blocks.append(block)


def lines_on_screen(written):
    """Return the lines that one sees at the end: what comes after "\\r" overwrites a line."""
    lines = []
    for text in written.replace("\r\n", "\n").split("\n"):
        line = ""
        for part in text.split("\r"):
            line = part + line[len(part) :]
        lines.append(line.rstrip())
    return lines
