"""Evaluates objects of torchmetrics in several processes, which torch.distributed joins, too.

torchrun --nproc-per-node 2 tests/support/jobs/evaluated.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from metric_objects import evaluated

dist.init_process_group("gloo")
found = {name: torch.as_tensor(value).tolist() for name, value in evaluated(1).items()}
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
dist.destroy_process_group()
