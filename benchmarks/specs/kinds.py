"""What many kinds of training cost with evenstep: in lines, and in time on one device.

Each is a program of `examples/kinds` that has its training twice: `plain`, in torch alone, and
`even`. A fresh process trains them in turns; an update's time is that between two updates.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmark import ROOT, Benchmark, script
from evenstep.bench import fresh
from evenstep.bench.tables import NOT_MEASURED, NOTHING, Table, number, spread, summarise

FOLDER = ROOT / "examples" / "kinds"
SETTINGS = {"turns": 5, "steps": 66, "skipped": 34}  # skipped: the first steps, with the checks
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "v1": {"devices": ["cpu:0"], "shards": 1},
    "v8": {"devices": ["cpu:0"], "shards": 8},
}

STEP = "`step`"
MEAN = "`step` with an objective"
GATHERED = "an objective with `all_gather`: one process"
KINDS: Mapping[str, tuple[str, str]] = {  # by program: its name, and what changes
    "arcface": ("Metric learning: ArcFace", STEP),
    "triplet": ("Metric learning: hardest triplets", GATHERED),
    "byol": ("BYOL", f"{MEAN}; the average is in `after_update`"),
    "clip": ("CLIP", GATHERED),
    "cpc": ("Contrastive predictive coding", GATHERED),
    "mae": ("Masked autoencoder", MEAN),
    "moco": ("MoCo", f"{MEAN}; the keys are in `loss.outputs`"),
    "simsiam": ("SimSiam", MEAN),
    "distillation": ("Distillation", f"{MEAN}, which calls the teacher"),
    "dpo": ("DPO", f"{MEAN}; `predict` asks the frozen model"),
    "grpo": ("GRPO", f"{MEAN}; `predict` writes the answers"),
    "ppo": ("PPO", f"{MEAN}; `predict` plays"),
    "dqn": ("DQN", f"{MEAN}; `predict` asks the target network"),
    "lora_transformers": ("LoRA, with transformers' `Trainer`", "`EvenTrainer`: one process"),
    "lightning_module": ("Lightning", "`EvenStrategy`: one process"),
    "moe": ("Mixture of experts, balanced", GATHERED),
    "unet_dice": ("U-Net, Dice loss of the batch", GATHERED),
    "dice_in_two_passes": (
        "U-Net, Dice loss in two passes",
        "`predict` gives the sums; the objective is linear in them",
    ),
    "vq_vae": ("VQ-VAE", f"{MEAN}; `buffers` adds up what the codebook follows"),
    "wgan_gp": ("WGAN-GP", f"{MEAN}; `backward` for the generator"),
    "truncated_bptt": ("Truncated BPTT", "the state is an output, with a row for each text"),
    "graphs": ("Graphs", "`Shards` of joined graphs; their number is the count"),
    "ensemble": ("Deep ensemble", STEP),
    "quantized": ("Quantisation-aware training", STEP),
    "sam": ("SAM", "`backward` twice"),
    "muon": ("Muon and AdamW", "`backward`, then both optimizers"),
    "schedule_free": ("Schedule-free SGD", STEP),
    "lookahead": ("Lookahead", STEP),
}
NEEDED = {"lora_transformers": "transformers", "lightning_module": "lightning"}


def measure(job: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the milliseconds of an update in each turn, by way."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    program = importlib.import_module(job["kind"])
    took_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(job["turns"]):
        for way, options in WAYS.items():
            train = program.even if options else program.plain
            train = functools.partial(train, steps=job["steps"], **options)
            took_ms[way].append(_update_ms(job, train))
    return took_ms


def _update_ms(job: Mapping[str, Any], train: Callable[[], object]) -> float:
    """Return the mean time between two updates of a training, behind its first steps."""
    ended_s: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: ended_s.append(time.perf_counter()))
    train()
    hook.remove()
    timed_s = ended_s[len(ended_s) * job["skipped"] // job["steps"] :]
    return 1e3 * (timed_s[-1] - timed_s[0]) / (len(timed_s) - 1)


# Lines


def lines(kind: str) -> tuple[int, int]:
    """Return how many lines `even` adds to `plain` or changes, and how many it removes or changes.

    Counted are imports of evenstep, both functions, and what only one of them uses. Indentation and
    empty lines don't count.
    """
    source = (FOLDER / f"{kind}.py").read_text(encoding="utf-8")
    plain, even = (_own_lines(source, name) for name in ("plain", "even"))
    changes = [*difflib.unified_diff(plain, even, lineterm="", n=0)][2:]
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    return added, removed


def _own_lines(source: str, name: str) -> list[str]:
    """Return the lines that a program would not have without the training `name`."""
    tree = ast.parse(source)
    defined = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    other = "plain" if name == "even" else "even"
    own = _used(defined, name) - _used(defined, other)
    found: list[str] = []
    for node in tree.body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and "evenstep" in ast.unparse(
            node
        )
        if (is_import and name == "even") or getattr(node, "name", None) in own:
            text = ast.get_source_segment(source, node) or ""
            found += [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in found if not line.startswith(f"def {name}(")]


def _used(defined: Mapping[str, ast.FunctionDef], name: str) -> set[str]:
    """Return a function's name and those of the functions that it uses, directly or not."""
    found, new = set[str](), {name}
    while new:
        found |= new
        words = {
            node.id for one in new for node in ast.walk(defined[one]) if isinstance(node, ast.Name)
        }
        new = (words & defined.keys()) - found
    return found


# The page


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of kinds."""
    rows = []
    for one in BENCHMARK.contenders:
        kind, (label, change) = one.job["kind"], KINDS[one.job["kind"]]
        added, removed = lines(kind)
        link = f"[{label}](../examples/kinds/{kind}.py)"
        rows.append([link, change, str(added), str(removed), *_times(one.runs(document))])
    head = ("kind", "what changes", "lines added or changed", "removed or changed")
    times = ("plain, ms an update", "V = 1", "spread", "V = 8", "spread of it")
    return {"kinds": Table((*head, *times), rows, 2)}


def _times(runs: list[Mapping[str, Any]]) -> list[str]:
    """Return the cells of an update's time, and of its multiples with evenstep, over all turns."""
    if not runs:
        return [*[NOTHING] * 4, NOT_MEASURED]
    plain = [took for run in runs for took in run["plain"]]
    found = [number(summarise(plain).median)]
    for way in ("v1", "v8"):
        took = [took for run in runs for took in run[way]]
        ratios = summarise([ours / theirs for ours, theirs in zip(took, plain, strict=True)])
        found += [f"{number(ratios.median)}×", spread(ratios)]
    return found


BENCHMARK = Benchmark(
    name="kinds",
    settings=SETTINGS,
    contenders=[
        script("kinds", kind, {"kind": kind, **SETTINGS}, label=label, needs=NEEDED.get(kind))
        for kind, (label, _) in KINDS.items()
    ],
    tables=tables,
    rounds=1,
)

if __name__ == "__main__":
    fresh.answer(measure)
