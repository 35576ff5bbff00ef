"""A portable training in several processes, or one that is stopped and resumed.

    portable.py OUT NAME [save FOLDER | load FOLDER]

Writes the fingerprint and what was logged to OUT.RANK.
"""

import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from portable_trainings import TRAININGS, trained

out, name, *state = sys.argv[1:]
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("evenstep").addHandler(handler)

assert name in TRAININGS
found = trained(name, devices=1, state=tuple(state))
rank = os.environ.get("RANK", "0")
Path(f"{out}.{rank}").write_text(json.dumps({"fingerprint": found, "notes": lines}))
