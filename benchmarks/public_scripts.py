"""Records public training scripts, unchanged, and compares pairs of their runs.

    python benchmarks/public_scripts.py CHECKOUTS WORK [--only NAME] [--out FILE]

CHECKOUTS holds karpathy/nanoGPT, pytorch/examples, Lightning-AI/pytorch-lightning and
huggingface/transformers in folders of these names (without the owner). Data are made; no model is
downloaded. A record that is there is used again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UPDATES = 20


@dataclasses.dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        repository: its owner and name.
        path: where the script is in it.
        framework: what trains.
        folder: the folder of the checkout that it needs; its runs begin in the script's folder.
        begin: the command line that all runs have in common.
    """

    repository: str
    path: str
    framework: str
    folder: str
    begin: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs of a script.

    Attributes:
        name: of the pair.
        script: the key of the script in `SCRIPTS`.
        runs: what each adds to the command line: before it ("torchrun ... |") and behind it.
    """

    name: str
    script: str
    runs: tuple[str, str]


TWO = "torchrun --nproc-per-node 2 --master-port 29611 |"

_CLM = (
    "--config_name {work}/gpt2 --tokenizer_name {work}/gpt2 --train_file {work}/train.txt "
    "--validation_file {work}/valid.txt --block_size 32"
)
_LANGUAGE_MODELING = "examples/pytorch/language-modeling"

SCRIPTS = {
    "clm": Script(
        "huggingface/transformers", f"{_LANGUAGE_MODELING}/run_clm.py", "Hugging Face Trainer",
        _LANGUAGE_MODELING,
        f"run_clm.py {_CLM} --output_dir {{work}}/clm-out --do_train --use_cpu --max_steps 20 "
        "--save_strategy no --report_to none --logging_steps 10",
    ),
    "clm-accelerate": Script(
        "huggingface/transformers", f"{_LANGUAGE_MODELING}/run_clm_no_trainer.py", "Accelerate",
        _LANGUAGE_MODELING,
        f"run_clm_no_trainer.py {_CLM} --max_train_steps 20 --seed 1",
    ),
    "word-lm": Script(
        "pytorch/examples", "word_language_model/main.py", "PyTorch", "word_language_model",
        "main.py --data {work}/words --emsize 32 --nhid 32 --epochs 1 --log-interval 10 "
        "--use-optimizer --lr 0.001 --save {work}/word-lm.pt",
    ),
    "sine": Script(
        "pytorch/examples", "time_sequence_prediction/train.py", "PyTorch (LBFGS)",
        "time_sequence_prediction", "train.py --steps 2",
    ),
    "nanogpt": Script(
        "karpathy/nanoGPT", "train.py", "PyTorch", ".",
        "train.py --device=cpu --dtype=float32 --dataset=shakespeare_char --n_layer=2 --n_head=2 "
        "--n_embd=32 --block_size=32 --max_iters=20 --eval_interval=1000 --eval_iters=1 "
        "--warmup_iters=0 --out_dir={work}/nanogpt-out",
    ),
    "pl-transformer": Script(
        "Lightning-AI/pytorch-lightning", "examples/pytorch/basics/transformer.py", "Lightning",
        "examples/pytorch/basics", "python transformer.py",
    ),
    "fabric-lm": Script(
        "Lightning-AI/pytorch-lightning", "examples/fabric/language_model/train.py",
        "Lightning Fabric", "examples/fabric/language_model", "train.py",
    ),
}  # fmt: skip

_B8, _B4 = "--per_device_train_batch_size 8", "--per_device_train_batch_size 4"
_FEW = "--max_train_samples 36"
_ACC = "--gradient_accumulation_steps"
_NANO = "--compile=False --batch_size=8 --gradient_accumulation_steps=1"
_PL = (
    "env PL_TRAINER_ACCELERATOR=cpu PL_TRAINER_LIMIT_VAL_BATCHES=1 PL_TRAINER_LIMIT_TEST_BATCHES=1"
    " PL_TRAINER_MAX_STEPS=20"
)
_FABRIC = "fabric run --accelerator=cpu --main-port=29612"

PAIRS = (
    Pair("trainer-2-processes", "clm", (_B8, f"{TWO} {_B4}")),
    Pair("trainer-accumulation", "clm", (_B8, f"{_B4} {_ACC} 2")),
    Pair("trainer-same-device-batch", "clm", (_B8, f"{TWO} {_B8}")),
    Pair("trainer-twice", "clm", (_B8, _B8)),
    Pair("trainer-decay", "clm", (_B8, f"{_B8} --weight_decay 0.1")),
    Pair("trainer-bf16", "clm", (_B8, f"{_B8} --bf16")),
    Pair("trainer-seed", "clm", (_B8, f"{_B8} --seed 7")),
    Pair("trainer-data-seed", "clm", (_B8, f"{_B8} --data_seed 7")),
    Pair("trainer-clip", "clm", (_B8, f"{_B8} --max_grad_norm 0.1")),
    Pair("trainer-rate", "clm", (_B8, f"{_B8} --learning_rate 1e-4")),
    Pair("trainer-warmup", "clm", (_B8, f"{_B8} --warmup_steps 5")),
    Pair("trainer-smoothing", "clm", (_B8, f"{_B8} --label_smoothing_factor 0.1")),
    Pair("trainer-checkpointing", "clm", (_B8, f"{_B8} --gradient_checkpointing")),
    Pair("trainer-optimizer", "clm", (_B8, f"{_B8} --optim adamw_torch")),
    Pair("trainer-workers", "clm", (_B8, f"{_B8} --dataloader_num_workers 2")),
    Pair("trainer-epoch-end", "clm", (f"{_B8} {_FEW}", f"{TWO} {_B4} {_FEW}")),
    Pair("trainer-epoch-end-accumulation", "clm", (f"{_B8} {_FEW}", f"{_B4} {_FEW} {_ACC} 2")),
    Pair("accelerate-2-processes", "clm-accelerate", (_B8, f"{TWO} {_B4}")),
    Pair("accelerate-accumulation", "clm-accelerate", (_B8, f"{_B4} {_ACC} 2")),
    Pair("accelerate-twice", "clm-accelerate", (_B8, _B8)),
    Pair("word-lm-seeds", "word-lm", ("", "--seed 7")),
    Pair("word-lm-dropout", "word-lm", ("--dropout 0", "--dropout 0.2")),
    Pair("word-lm-twice", "word-lm", ("", "")),
    Pair("word-lm-transformer-twice", "word-lm", ("--model Transformer", "--model Transformer")),
    Pair("word-lm-batch", "word-lm", ("--dropout 0", "--dropout 0 --batch_size 10")),
    Pair("word-lm-clip", "word-lm", ("", "--clip 0.01")),
    Pair("sine-twice", "sine", ("", "")),
    Pair("nanogpt-accumulation", "nanogpt",
         (_NANO, "--compile=False --batch_size=4 --gradient_accumulation_steps=2")),
    Pair("nanogpt-dropout", "nanogpt", (_NANO, f"{_NANO} --dropout=0.1")),
    Pair("nanogpt-twice", "nanogpt", (_NANO, _NANO)),
    Pair("nanogpt-compile", "nanogpt", (_NANO, _NANO.replace("=False", "=True"))),
    Pair("nanogpt-clip", "nanogpt", (_NANO, f"{_NANO} --grad_clip=0.0")),
    Pair("lightning-2-processes", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_DEVICES=2 PL_TRAINER_STRATEGY=ddp |")),
    Pair("lightning-accumulation", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_ACCUMULATE_GRAD_BATCHES=2 |")),
    Pair("lightning-twice", "pl-transformer", (f"{_PL} |", f"{_PL} |")),
    Pair("lightning-bf16", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_PRECISION=bf16-mixed |")),
    Pair("fabric-2-processes", "fabric-lm",
         (f"{_FABRIC} --devices=1 |", f"{_FABRIC} --devices=2 --strategy=ddp |")),
    Pair("fabric-twice", "fabric-lm", (f"{_FABRIC} --devices=1 |", f"{_FABRIC} --devices=1 |")),
)  # fmt: skip


def made_text(lines: int, seed: int) -> str:
    """Return sentences of made words."""
    draw = random.Random(seed)
    ends = ("n", "r", "s", "l", "t", "da", "mo", "vi")
    words = [a + b for a in ("ka", "lo", "mi", "ne", "tu", "ra", "se", "po") for b in ends]
    return "".join(
        " ".join(draw.choice(words) for _ in range(draw.randint(6, 14))) + ".\n"
        for _ in range(lines)
    )


def make_data(work: Path) -> None:
    """Write texts, a tokenizer and the configuration of a small GPT-2."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    (work / "words").mkdir(parents=True, exist_ok=True)
    (work / "train.txt").write_text(made_text(3000, 1))
    (work / "valid.txt").write_text(made_text(300, 2))
    for part, lines in (("train", 1700), ("valid", 50), ("test", 50)):
        (work / "words" / f"{part}.txt").write_text(made_text(lines, lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, alphabet = ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(work / "train.txt")], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], bos_token=special[0], model_max_length=64
    ).save_pretrained(work / "gpt2")
    GPT2Config(
        vocab_size=320, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ).save_pretrained(work / "gpt2")  # fmt: skip


def make_copy(script: Script, checkouts: Path, work: Path) -> Path:
    """Return a copy of the script's folder, with the data that it reads."""
    source = checkouts / script.repository.partition("/")[2] / script.folder
    copy = work / "copies" / hashlib.blake2b(str(source).encode(), digest_size=4).hexdigest()
    if copy.exists():
        return copy
    shutil.copytree(source, copy)
    if script.path == "train.py":
        data = copy / "data" / "shakespeare_char"
        (data / "input.txt").write_text(made_text(2000, 3))
        subprocess.run([sys.executable, data / "prepare.py"], check=True)
    if script.framework.startswith("Lightning"):
        (copy / "data").mkdir()
        (copy / "data" / "wikitext-2.txt").write_text(made_text(14200, 4))
    if script.framework.endswith("(LBFGS)"):
        subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=copy, check=True)
    return copy


def command_of(script: Script, run: str, work: Path) -> str:
    """Return the command line of a run."""
    before, bar, behind = run.rpartition("|")
    return " ".join(f"{before if bar else ''} {script.begin} {behind}".split()).format(work=work)


def record(command: str, record_at: Path, folder: Path, environment: dict[str, str]) -> None:
    """Record a run, unless its record is there already; its output goes beside the record."""
    if record_at.exists():
        return
    steps = ["evenstep", "record", "--out", str(record_at), "--steps", str(UPDATES)]
    with record_at.with_suffix(".log").open("wb") as log:
        code = subprocess.run(
            [*steps, *shlex.split(command)], cwd=folder, env=environment, stdout=log, stderr=log,
            timeout=600, check=False,
        ).returncode  # fmt: skip
    print(f"  exit code {code}: {command}", flush=True)


def run_pairs(checkouts: Path, work: Path, only: str) -> Iterator[dict[str, Any]]:
    """Run pairs, and yield what is to be kept of each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(work / "hf"),
                   "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # fmt: skip
    for pair in PAIRS:
        if only not in pair.name:
            continue
        print(pair.name, flush=True)
        script = SCRIPTS[pair.script]
        folder = make_copy(script, checkouts, work)
        commands = [command_of(script, run, work) for run in pair.runs]
        records = []
        for number, command in enumerate(commands):
            again = "-again" if number and command == commands[0] else ""
            key = hashlib.blake2b(command.encode(), digest_size=6).hexdigest()
            records.append(work / "records" / f"{pair.script}-{key}{again}.rec")
            record(command, records[-1], folder, environment)
        said = [
            subprocess.run(
                ["evenstep", "compare", *records, *more],
                capture_output=True,
                text=True,
                check=False,
            )
            for more in ((), ("--json",))
        ]
        lines = (said[0].stdout + said[0].stderr).splitlines()
        print("\n".join(lines), flush=True)
        revision = checkouts / script.repository.partition("/")[2] / "REVISION"
        yield {
            "name": pair.name, "repository": script.repository,
            "revision": revision.read_text().strip() if revision.exists() else "",
            "script": script.path, "framework": script.framework,
            "runs": [one.replace(str(work), "WORK") for one in commands],
            "verdict": lines[0] if lines else "", "cause": cause_in(said[1].stdout),
            "output": [one.replace(f"{work}/records/", "") for one in lines],
        }  # fmt: skip


def cause_in(answer: str) -> str:
    """Return the name of the cause in the answer of `compare --json`."""
    try:
        return str(json.loads(answer).get("cause", ""))
    except ValueError:
        return ""


def main() -> None:
    """Run the pairs, and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default="", help="only pairs with this in their names")
    parser.add_argument("--out", type=Path, help="the list of what was found")
    given = parser.parse_args()
    work = given.work.resolve()
    (work / "records").mkdir(parents=True, exist_ok=True)
    if not (work / "gpt2").exists():
        make_data(work)
    found = [*run_pairs(given.checkouts.resolve(), work, given.only)]
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
