"""Evaluates objects of torchmetrics in several processes, which torch.distributed joins, too.

torchrun --nproc-per-node 2 tests/support/jobs/evaluated.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from metric_objects import LOADER, evaluated, plainly

dist.init_process_group("gloo")
found = [plainly(evaluated(1)), plainly(evaluated(1, LOADER))]
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
dist.destroy_process_group()
