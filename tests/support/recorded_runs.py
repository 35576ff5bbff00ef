"""Runs of `jobs/recorded.py`, recorded once in a test session, and compared."""

import functools

from evenstep.comparison import find_cause, read_run
from launched import alone, launched


class Records:
    """Records by their processes and faults, in a folder."""

    def __init__(self, folder):
        self._folder = folder
        self.run = functools.cache(self._run)

    def _run(self, processes, *faults):
        out = self._folder / f"{processes} {' '.join(faults) or 'plain'}.rec"
        if processes == 1:
            finished = alone("recorded.py", out, *faults)
        else:
            finished = launched(processes, "recorded.py", out, *faults)
        assert finished.returncode == 0, finished.stderr
        run = read_run(out)
        assert len(run.processes) == processes
        return run

    def cause(self, one, other):
        """Return what is found for two runs, each (processes, fault, ...)."""
        return find_cause(self.run(*one), self.run(*other))
