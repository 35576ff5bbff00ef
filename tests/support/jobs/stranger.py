"""Trains a program of `examples/strangers`, whole and with a stop, in one process or several.

    torchrun --nproc-per-node 2 tests/support/jobs/stranger.py OUT SOURCE STOP [ARGUMENT ...]

Writes to OUT what each rank has trained: without a stop; and up to line STOP of the program's
progress, then from its checkpoint on.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import strangers

RANK = os.environ.get("RANK", "0")


def main():
    """Train three times."""
    out, source, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    arguments = sys.argv[4:]
    whole = strangers.run(source, arguments)
    begun = strangers.run(source, arguments, save=(stop, out))
    ended = strangers.run(source, arguments, resume=out, until=whole[-1][0])
    (out / f"{RANK}.json").write_text(json.dumps([whole, begun + ended]))


if __name__ == "__main__":
    main()
