"""Records public training scripts, unchanged, and compares pairs of their runs.

    python benchmarks/public_scripts.py CHECKOUTS WORK [--only NAME] [--out FILE]

CHECKOUTS holds karpathy/nanoGPT, karpathy/makemore, pytorch/examples, huggingface/transformers and
Lightning-AI/pytorch-lightning in folders of these names (without the owner), each with its revision
in a file REVISION, and accelerate-0.34.2 (`pip install --target`), which one of the scripts needs.
Data are made; no model is downloaded. A record that is there is used again.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmark import command_line
from evenstep.bench.results import Record

UPDATES = 20
TIMEOUT_S = 400
LIBRARIES = ("torch", "transformers", "accelerate", "lightning")


@dataclasses.dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        repository: its owner and name.
        path: where the script is in it.
        framework: what trains.
        folder: the folder of the checkout that it needs; its runs begin in the script's folder.
        begin: the command line that all runs have in common.
        library: a folder of CHECKOUTS that the script imports from.
    """

    repository: str
    path: str
    framework: str
    folder: str
    begin: str
    library: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs of a script.

    Attributes:
        name: of the pair.
        script: the key of the script in `SCRIPTS`.
        runs: what each adds to the command line: before it ("torchrun ... |") and behind it.
        reason: why this is the right answer, found without evenstep: by the script's source, or by
            printing what it computes.
    """

    name: str
    script: str
    runs: tuple[str, str]
    reason: str


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
        library="accelerate-0.34.2",
    ),
    "glue": Script(
        "huggingface/transformers", "examples/pytorch/text-classification/run_glue.py",
        "Hugging Face Trainer", "examples/pytorch/text-classification",
        "run_glue.py --model_name_or_path {work}/bert --train_file {work}/classes-train.csv "
        "--validation_file {work}/classes-valid.csv --max_seq_length 16 --output_dir {work}/out "
        "--do_train --use_cpu --max_steps 20 --save_strategy no --report_to none",
    ),
    "translation": Script(
        "huggingface/transformers", "examples/pytorch/translation/run_translation.py",
        "Hugging Face Trainer", "examples/pytorch/translation",
        "run_translation.py --model_name_or_path {work}/t5 --train_file {work}/pairs-train.json "
        "--validation_file {work}/pairs-valid.json --source_lang en --target_lang de "
        "--max_source_length 16 --max_target_length 16 --pad_to_max_length --output_dir {work}/out "
        "--do_train --use_cpu --max_steps 20 --save_strategy no --report_to none",
    ),
    "makemore": Script(
        "karpathy/makemore", "makemore.py", "PyTorch", ".",
        "makemore.py --max-steps 20 --n-layer 2 --n-embd 32 --work-dir out",
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
_DYNAMIC = "--pad_to_max_length False"
_FABRIC = "fabric run --accelerator=cpu --main-port=29612"

PAIRS = (
    Pair("trainer-2-processes", "clm", (_B8, f"{TWO} {_B4}"),
         "the Trainer deals both processes parts of the same batch and divides by all tokens"),
    Pair("trainer-accumulation", "clm", (_B8, f"{_B4} {_ACC} 2"),
         "since transformers 4.46 the Trainer divides by the tokens of all accumulated batches"),
    Pair("trainer-same-device-batch", "clm", (_B8, f"{TWO} {_B8}"),
         "the option is a size for each device: two processes take 16"),
    Pair("trainer-twice", "clm", (_B8, _B8), "one command"),
    Pair("trainer-decay", "clm", (_B8, f"{_B8} --weight_decay 0.1"), "the option"),
    Pair("trainer-bf16", "clm", (_B8, f"{_B8} --bf16"), "the option"),
    Pair("trainer-seed", "clm", (_B8, f"{_B8} --seed 7"), "the weights are drawn after the seed"),
    Pair("trainer-data-seed", "clm", (_B8, f"{_B8} --data_seed 7"),
         "the sampler's seed differs, the weights' doesn't"),
    Pair("trainer-clip", "clm", (_B8, f"{_B8} --max_grad_norm 0.1"), "the option; 1.0 without it"),
    Pair("trainer-rate", "clm", (_B8, f"{_B8} --learning_rate 1e-4"), "the option"),
    Pair("trainer-warmup", "clm", (_B8, f"{_B8} --warmup_steps 5"),
         "the rate is 0 in the first update"),
    Pair("trainer-smoothing", "clm", (_B8, f"{_B8} --label_smoothing_factor 0.1"),
         "the Trainer then computes the loss itself, and doesn't give labels to the model"),
    Pair("trainer-checkpointing", "clm", (_B8, f"{_B8} --gradient_checkpointing"),
         "layers are computed again with the same bits"),
    Pair("trainer-optimizer", "clm", (_B8, f"{_B8} --optim adamw_torch"),
         "the other one is AdamW's fused kernel"),
    Pair("trainer-workers", "clm", (_B8, f"{_B8} --dataloader_num_workers 2"),
         "workers don't change the order"),
    Pair("trainer-epoch-end", "clm", (f"{_B8} {_FEW}", f"{TWO} {_B4} {_FEW}"),
         "36 examples: at the epoch's end four are left, which two processes fill up to eight"),
    Pair("trainer-epoch-end-accumulation", "clm", (f"{_B8} {_FEW}", f"{_B4} {_FEW} {_ACC} 2"),
         "the Trainer counts what is left at the epoch's end"),
    Pair("accelerate-2-processes", "clm-accelerate", (_B8, f"{TWO} {_B4}"),
         "each process takes every second batch of 4, not half of each batch of 8"),
    Pair("accelerate-accumulation", "clm-accelerate", (_B8, f"{_B4} {_ACC} 2"),
         "no token is masked, so a mean of means is the mean"),
    Pair("accelerate-twice", "clm-accelerate", (_B8, _B8), "one command"),
    Pair("glue-padded-accumulation", "glue", (_B8, f"{_B4} {_ACC} 2"),
         "the Trainer takes this model's loss for one that divides by what is accumulated, which "
         "it isn't: gradients are twice as large"),
    Pair("glue-dynamic-accumulation", "glue", (f"{_B8} {_DYNAMIC}", f"{_B4} {_ACC} 2 {_DYNAMIC}"),
         "each batch is filled up to its own longest sentence"),
    Pair("translation-accumulation", "translation", (_B8, f"{_B4} {_ACC} 2"),
         "as above; T5's loss is a mean over the words of its part, besides"),
    Pair("translation-2-processes", "translation", (_B8, f"{TWO} {_B4}"),
         "the Trainer multiplies by the number of processes, for a loss that divides by all words; "
         "T5's doesn't"),
    Pair("word-lm-seeds", "word-lm", ("", "--seed 7"), "the weights are drawn after the seed"),
    Pair("word-lm-dropout", "word-lm", ("--dropout 0", "--dropout 0.2"), "the option"),
    Pair("word-lm-twice", "word-lm", ("", ""), "one command"),
    Pair("word-lm-transformer-twice", "word-lm", ("--model Transformer", "--model Transformer"),
         "one command"),
    Pair("word-lm-batch", "word-lm", ("--dropout 0", "--dropout 0 --batch_size 10"),
         "the model's first dimension is time: the batch is the second"),
    Pair("word-lm-clip", "word-lm", ("", "--clip 0.01"), "the option; 0.25 without it"),
    Pair("sine-twice", "sine", ("", ""), "one command"),
    Pair("nanogpt-accumulation", "nanogpt",
         (_NANO, "--compile=False --batch_size=4 --gradient_accumulation_steps=2"),
         "batches are drawn at random: twice 4 are other places of the text than 8"),
    Pair("nanogpt-dropout", "nanogpt", (_NANO, f"{_NANO} --dropout=0.1"), "the option"),
    Pair("nanogpt-twice", "nanogpt", (_NANO, _NANO), "one command"),
    Pair("nanogpt-compile", "nanogpt", (_NANO, _NANO.replace("=False", "=True")),
         "the compiler joins kernels, which round otherwise"),
    Pair("nanogpt-clip", "nanogpt", (_NANO, f"{_NANO} --grad_clip=0.0"), "the option"),
    Pair("makemore-twice", "makemore", ("-n 0", "-n 0"), "one command"),
    Pair("makemore-decay", "makemore", ("-n 0", "-n 0 -w 0.1"), "the option"),
    Pair("makemore-workers", "makemore", ("-n 0 --type rnn", "-n 2 --type rnn"),
         "workers don't change the order"),
    Pair("lightning-2-processes", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_DEVICES=2 PL_TRAINER_STRATEGY=ddp |"),
         "the script's batch is one for each process"),
    Pair("lightning-accumulation", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_ACCUMULATE_GRAD_BATCHES=2 |"),
         "the batch stays as it is, and two make an update"),
    Pair("lightning-twice", "pl-transformer", (f"{_PL} |", f"{_PL} |"), "one command"),
    Pair("lightning-bf16", "pl-transformer",
         (f"{_PL} |", f"{_PL} PL_TRAINER_PRECISION=bf16-mixed |"), "the option"),
    Pair("fabric-2-processes", "fabric-lm",
         (f"{_FABRIC} --devices=1 |", f"{_FABRIC} --devices=2 --strategy=ddp |"),
         "the script's batch is one for each process"),
    Pair("fabric-bf16", "fabric-lm",
         (f"{_FABRIC} --devices=1 |", f"{_FABRIC} --devices=1 --precision=bf16-true |"),
         "the weights themselves are bfloat16"),
    Pair("fabric-twice", "fabric-lm", (f"{_FABRIC} --devices=1 |", f"{_FABRIC} --devices=1 |"),
         "one command"),
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
    """Write texts, tokenizers, and small models with random weights."""
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        T5Config,
        T5ForConditionalGeneration,
    )

    (work / "words").mkdir(parents=True, exist_ok=True)
    (work / "train.txt").write_text(made_text(3000, 1))
    (work / "valid.txt").write_text(made_text(300, 2))
    for part, lines in (("train", 1700), ("valid", 50), ("test", 50)):
        (work / "words" / f"{part}.txt").write_text(made_text(lines, lines))
    for part, lines in (("train", 500), ("valid", 100)):
        write_sentences(work, part, made_text(lines, lines + 1).splitlines())
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save_tokenizer(work / "gpt2", models.BPE(), words, trainer, eos="<|endoftext|>")
    GPT2Config(
        vocab_size=320, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ).save_pretrained(work / "gpt2")  # fmt: skip
    sizes = {
        name: save_tokenizer(
            work / name,
            models.WordLevel(unk_token="<unk>"),
            pre_tokenizers.Whitespace(),
            trainers.WordLevelTrainer(
                special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False
            ),
            eos="</s>", pad="<pad>", unk="<unk>", cls="<unk>", sep="</s>",
        )
        for name in ("bert", "t5")
    }  # fmt: skip
    torch.manual_seed(0)
    BertForMaskedLM(
        BertConfig(
            vocab_size=sizes["bert"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=0,
        )
    ).save_pretrained(work / "bert")  # fmt: skip
    T5ForConditionalGeneration(
        T5Config(
            vocab_size=sizes["t5"], d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
            dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    ).save_pretrained(work / "t5")  # fmt: skip


def save_tokenizer(folder: Path, model: Any, words: Any, trainer: Any, **special: str) -> int:
    """Train a tokenizer on the texts, and save it; return the number of its tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    tokenizer.train([str(folder.parent / "train.txt")], trainer)
    names = {f"{name}_token": token for name, token in special.items()}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
    saved.save_pretrained(folder)
    return len(saved)


def write_sentences(work: Path, part: str, lines: Sequence[str]) -> None:
    """Write sentences of two classes, and pairs of sentences, of 1 to 14 words."""
    draw = random.Random(part)
    with (work / f"classes-{part}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sentence1", "label"])
        rows.writerows([cut(line, draw), draw.randint(0, 1)] for line in lines)
    pairs = ({"en": line, "de": cut(line[::-1], draw)} for line in lines)
    text = "".join(json.dumps({"translation": one}) + "\n" for one in pairs)
    (work / f"pairs-{part}.json").write_text(text)


def cut(line: str, draw: random.Random) -> str:
    """Return the first words of a line."""
    return " ".join(line.split()[: draw.randint(1, 14)])


METRICS = ("accuracy", "sacrebleu")
_METRIC = """import datasets
import evaluate
class Metric(evaluate.Metric):
    def _info(self):
        value = datasets.Features({"predictions": datasets.Value("int32"),
                                   "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="",
                                   features=value)
    def _compute(self, predictions, references):
        return {}
"""
"""What stands for a metric that would be downloaded; without evaluation, nothing calls it."""


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
    for metric in METRICS:
        if metric in (copy / script.path.rpartition("/")[2]).read_text():
            (copy / metric).mkdir(exist_ok=True)
            (copy / metric / f"{metric}.py").write_text(_METRIC)
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
        run = subprocess.Popen(
            [*steps, *shlex.split(command)], cwd=folder, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended = f"exit code {run.wait(TIMEOUT_S)}"
        except subprocess.TimeoutExpired:  # at the end of a process, gloo may wait for itself
            os.killpg(run.pid, signal.SIGKILL)
            ended = f"killed after {TIMEOUT_S} s"
    print(f"  {ended}: {command}", flush=True)


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
        library = [str(checkouts / script.library)] if script.library else []
        paths = {**environment, "PYTHONPATH": ":".join(library)}
        commands = [command_of(script, run, work) for run in pair.runs]
        records = []
        for number, command in enumerate(commands):
            again = "-again" if number and command == commands[0] else ""
            key = hashlib.blake2b(command.encode(), digest_size=6).hexdigest()
            records.append(work / "records" / f"{pair.script}-{key}{again}.rec")
            record(command, records[-1], folder, paths)
        said = subprocess.run(
            ["evenstep", "compare", *records], capture_output=True, text=True, check=False
        )
        lines = (said.stdout + said.stderr).splitlines()
        for path, name in zip(records, ("A", "B"), strict=True):
            lines = [one.replace(str(path), name) for one in lines]
        print("\n".join(lines), flush=True)
        revision = checkouts / script.repository.partition("/")[2] / "REVISION"
        yield {
            "round": 0, "name": pair.name, "repository": script.repository,
            "revision": revision.read_text().strip(), "script": script.path,
            "framework": script.framework, "reason": pair.reason,
            "runs": [one.replace(str(work), "WORK") for one in commands],
            "exit_code": said.returncode, "output": lines,
        }  # fmt: skip


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
    versions = {name: metadata.version(name) for name in LIBRARIES}
    result = Record("public_scripts", command_line(sys.argv), given.out, versions=versions)
    for run in run_pairs(given.checkouts.resolve(), work, given.only):
        result.add(run)


if __name__ == "__main__":
    main()
