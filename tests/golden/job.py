"""A golden run in one of several processes: `torchrun ... golden/job.py JOB` (see runs.py)."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import runs
import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    result = runs.train_zoo(job["model"], **job["options"])
    (Path(job["out"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
