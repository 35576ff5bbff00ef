"""Records public training scripts, unchanged, and compares pairs of their runs.

    python benchmarks/public_scripts.py CHECKOUTS WORK [--only NAME] [--out FILE]

`public_scripts.json` has the scripts and the pairs. CHECKOUTS holds karpathy/nanoGPT,
karpathy/makemore, pytorch/examples, huggingface/transformers and Lightning-AI/pytorch-lightning in
folders of these names (without the owner), each with its revision in a file REVISION, and
accelerate-0.34.2 (`pip install --target`), which one of the scripts needs. Data are made; no model
is downloaded. A record that is there is used again.
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
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmark import FOLDER, command_line
from evenstep.bench import Record, results

UPDATES = 20
TIMEOUT_S = 400
LIBRARIES = ("torch", "transformers", "accelerate", "lightning")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}
EVENSTEP = (sys.executable, "-m", "evenstep")
DESCRIBED = results.load(FOLDER / "public_scripts.json")


@dataclasses.dataclass(frozen=True)
class Script:
    """A public script."""

    repository: str  # its owner and name
    path: str  # where the script is in it
    framework: str  # what trains
    folder: str  # the folder of the checkout that it needs; its runs begin in the script's folder
    begin: str  # the command line that all runs have in common
    library: str = ""  # a folder of CHECKOUTS that the script imports from

    def command(self, run: str, work: Path) -> str:
        """Return the command line of a run: what is before a bar, `begin`, and what is behind."""
        words = {name: text.format(work=work) for name, text in DESCRIBED["words"].items()}
        before, bar, behind = run.format(**words).rpartition("|")
        begin = self.begin.format(work=work, **words)
        return " ".join(f"{before if bar else ''} {begin} {behind}".split())


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs of a script."""

    name: str  # of the pair
    script: str  # the key of the script
    runs: tuple[str, str]  # what each adds to the command line
    # why this is the right answer, found without evenstep: by the script's source, or by printing
    # what it computes
    reason: str


SCRIPTS = {name: Script(**one) for name, one in DESCRIBED["scripts"].items()}
PAIRS = [Pair(**one) for one in DESCRIBED["pairs"]]


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
    import transformers
    from tokenizers import models, pre_tokenizers, trainers

    (work / "words").mkdir(parents=True, exist_ok=True)
    for part, lines, seed in (("train", 3000, 1), ("valid", 300, 2)):
        (work / f"{part}.txt").write_text(made_text(lines, seed))
    for part, lines in (("train", 1700), ("valid", 50), ("test", 50)):
        (work / "words" / f"{part}.txt").write_text(made_text(lines, lines))
    for part, lines in (("train", 500), ("valid", 100)):
        write_sentences(work, part, made_text(lines, lines + 1).splitlines())
    letters, end = pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"
    pairs = trainers.BpeTrainer(vocab_size=320, special_tokens=[end], initial_alphabet=letters)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    save_tokenizer(work / "gpt2", models.BPE(), split, pairs, eos=end)
    special = {"eos": "</s>", "pad": "<pad>", "unk": "<unk>", "cls": "<unk>", "sep": "</s>"}
    sizes = {}
    for name in ("bert", "t5"):
        words = trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
        level, split = models.WordLevel(unk_token="<unk>"), pre_tokenizers.Whitespace()
        sizes[name] = save_tokenizer(work / name, level, split, words, **special)
    small = DESCRIBED["models"]
    transformers.GPT2Config(**small["gpt2"]).save_pretrained(work / "gpt2")
    torch.manual_seed(0)
    bert = transformers.BertConfig(vocab_size=sizes["bert"], **small["bert"])
    transformers.BertForMaskedLM(bert).save_pretrained(work / "bert")
    t5 = transformers.T5Config(vocab_size=sizes["t5"], **small["t5"])
    transformers.T5ForConditionalGeneration(t5).save_pretrained(work / "t5")


def save_tokenizer(folder: Path, model: Any, split: Any, trainer: Any, **special: str) -> int:
    """Train a tokenizer on the texts, and save it; return the number of its tokens."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, trainer.show_progress = split, False
    tokenizer.train([str(folder.parent / "train.txt")], trainer)
    names = {f"{name}_token": token for name, token in special.items()}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
    saved.save_pretrained(folder)
    return len(saved)


def write_sentences(work: Path, part: str, lines: Sequence[str]) -> None:
    """Write sentences of two classes, and pairs of sentences, of 1 to 14 words."""
    draw = random.Random(part)

    def cut(line: str) -> str:
        return " ".join(line.split()[: draw.randint(1, 14)])

    with (work / f"classes-{part}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sentence1", "label"])
        rows.writerows([cut(line), draw.randint(0, 1)] for line in lines)
    pairs = ({"en": line, "de": cut(line[::-1])} for line in lines)
    text = "".join(json.dumps({"translation": one}) + "\n" for one in pairs)
    (work / f"pairs-{part}.json").write_text(text)


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


def record(
    command: str,
    record_at: Path,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    updates: int = UPDATES,
) -> None:
    """Record a run, unless its record is there already; its output goes beside the record."""
    if record_at.exists():
        return
    steps = [*EVENSTEP, "record", "--out", str(record_at), "--steps", str(updates)]
    more: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
    with record_at.with_suffix(".log").open("wb") as log:
        run = subprocess.Popen([*steps, *shlex.split(command)], stdout=log, stderr=log, **more)
        try:
            ended = f"exit code {run.wait(TIMEOUT_S)}"
        except subprocess.TimeoutExpired:  # at the end of a process, gloo may wait for itself
            os.killpg(run.pid, signal.SIGKILL)
            ended = f"killed after {TIMEOUT_S} s"
    print(f"  {ended}: {command}", flush=True)


def compare(records: Sequence[Path], names: Sequence[str]) -> tuple[int, list[str]]:
    """Compare two records; return the exit code, and what was said with names for their paths."""
    command = [*EVENSTEP, "compare", *map(str, records)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    text = said.stdout + said.stderr
    for path, name in zip(records, names, strict=True):
        text = text.replace(str(path), name)
    print(text, flush=True)
    return said.returncode, text.splitlines()


def run_pairs(checkouts: Path, work: Path, only: str) -> Iterator[dict[str, Any]]:
    """Run pairs, and yield what is to be kept of each."""
    for pair in (pair for pair in PAIRS if only in pair.name):
        print(pair.name, flush=True)
        script = SCRIPTS[pair.script]
        folder = make_copy(script, checkouts, work)
        library = str(checkouts / script.library) if script.library else ""
        paths = {"HF_HOME": str(work / "hf"), "PYTHONPATH": library}
        commands = [script.command(run, work) for run in pair.runs]
        records = []
        for number, command in enumerate(commands):
            again = "-again" if number and command == commands[0] else ""
            key = hashlib.blake2b(command.encode(), digest_size=6).hexdigest()
            records.append(work / "records" / f"{pair.script}-{key}{again}.rec")
            record(command, records[-1], folder, {**os.environ, **ENVIRONMENT, **paths})
        exit_code, lines = compare(records, ("A", "B"))
        revision = checkouts / script.repository.partition("/")[2] / "REVISION"
        yield {
            "round": 0,
            "name": pair.name,
            "repository": script.repository,
            "revision": revision.read_text().strip(),
            "script": script.path,
            "framework": script.framework,
            "reason": pair.reason,
            "runs": [one.replace(str(work), "WORK") for one in commands],
            "exit_code": exit_code,
            "output": lines,
        }


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
