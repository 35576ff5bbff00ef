"""Fresh processes for the scripts below `benchmarks/contenders`."""

from __future__ import annotations

import functools
from pathlib import Path

from evenstep.bench.fresh import RunFailedError as RunFailedError
from evenstep.bench.fresh import run_module as _run_module

run_module = functools.partial(_run_module, folder=Path(__file__).resolve().parent)
