"""Runs examples and notebooks in portable arithmetic, and says which fingerprints they end with.

    python tests/support/portable_program.py notebooks/5_concise.md
    python tests/support/portable_program.py --record     # all, into tests/arithmetic/programs.json

A fingerprint is that at the end of a `with Trainer(...)`. The digest of all of a program's is in
the table of docs/portable.md.
"""

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/arithmetic/programs.json"
PROGRAMS = {
    "examples/concise.py": ("cpu:0", "1"),
    "examples/by_stage_rates.py": ("cpu:0",),
    "examples/batchnorm.py": (),
    "examples/large_batch.py": ("1",),
    "notebooks/5_concise.md": (),
    "notebooks/6_sixteen_devices.md": (),
    "notebooks/8_three_ways.md": (),
}
"""Programs that train with a trainer, and their arguments."""


def run(path, *arguments):
    """Run a program in this process; return the fingerprints of its trainings."""
    import matplotlib

    import evenstep

    found = []

    class Noted(evenstep.Trainer):
        """A trainer that notes its fingerprint at the end."""

        def __exit__(self, kind, *error):
            """Note it, and close."""
            if kind is None:
                found.append(self.fingerprint())
            return super().__exit__(kind, *error)

    matplotlib.use("agg")
    sys.argv = [str(path), *arguments]
    evenstep.Trainer = Noted
    with evenstep.portable(seed=0):
        if path.suffix == ".py":
            runpy.run_path(str(path), run_name="__main__")
        else:
            exec(compile(code_of(path), str(path), "exec"), {"__name__": "__main__"})
    return found


def code_of(notebook):
    """Return the program in a notebook's text."""
    import jupytext

    cells = jupytext.read(notebook).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def digest_of(program, **environment):
    """Run a program in a process of its own; return "N fingerprints, DIGEST"."""
    with tempfile.TemporaryDirectory() as folder:  # notebooks write pictures
        done = subprocess.run(
            [sys.executable, __file__, ROOT / program, *PROGRAMS[program]],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record = {program: digest_of(program) for program in PROGRAMS}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    else:
        fingerprints = run(Path(sys.argv[1]), *sys.argv[2:])
        digest = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()
        print(f"{len(fingerprints)} fingerprints, {digest[:16]}")
