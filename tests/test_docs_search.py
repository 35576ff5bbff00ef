"""The search of the documentation site: for each query, the page that must come first."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TAG = re.compile("<[^>]+>")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(310)]  # the build
lunr = pytest.importorskip("lunr", reason="pip install '.[docs]'")
pytest.importorskip("mkdocstrings_handlers.python", reason="pip install '.[docs]'")
pytest.importorskip("material", reason="pip install '.[docs]'")

PAGES = {
    "start": "install",
    "everyday": "freeze, freeze layers, fine-tuning, transfer learning, float16, mixed precision, "
    "gradient accumulation, checkpoint, EMA, early stopping, out of memory, learning rate, "
    "clipping",
    "gpus": "GPU",
    "gpus|faq": "CUDA",
    "when_not_to_use": "MPS",
    "when_not_to_use|index": "FSDP",
    "coming_from|faq": "DDP",
    "faq|clusters": "torchrun",
    "clusters": "slurm, kubernetes",
    "lightning": "Lightning",
    "hugging_face": "Hugging Face",
    "coming_from|mxnet": "MXNet",
    "promise|faq": "batch norm",
    "recipes": "contrastive",
    "recipes|hugging_face": "class weights",
    "how_to|recipes": "GAN",
    "loaders|faq": "DataLoader",
    "loaders": "workers",
    "everyday|command_line|loaders": "resume",
    "logging": "progress bar, wandb",
    "logging|reference/callbacks": "tensorboard",
    "export": "ONNX, compile",
    "concepts": "shards",
    "faq|start": "fingerprint",
    "reference/trainer": "evaluate",
    "compare": "why do two trainings differ, compare",
    "debugging|command_line": "verify",
    "layouts|benchmarks_layouts": "uneven devices",
    "reliability": "kill",
}  # fmt: skip
"""The pages that come first, without ".html", by their queries; where several are as good, all."""
QUERIES = {query: page for page, queries in PAGES.items() for query in queries.split(", ")}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Build the site, and return an index as its search page makes it in the browser."""
    from lunr.builder import Builder
    from lunr.stop_word_filter import stop_word_filter
    from lunr.trimmer import trimmer

    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=300,
    )  # fmt: skip
    given = json.loads((folder / "search" / "search_index.json").read_text(encoding="utf-8"))
    builder = Builder()
    builder.pipeline.add(trimmer, stop_word_filter)
    builder.ref("location")
    builder.field("title", boost=given["config"]["fields"]["title"]["boost"])
    builder.field("text", boost=given["config"]["fields"]["text"]["boost"])
    for one in given["docs"]:
        words = {name: html.unescape(TAG.sub(" ", one[name])) for name in ("title", "text")}
        builder.add({"location": one["location"], **words}, {"boost": one.get("boost", 1)})
    return builder.build()


def first_page(index, query):
    """Return the page that the site's search shows first, ranked as its script does.

    Each word may go on. A hit counts more if it is a page's beginning, and the more words it has.
    """
    from lunr.stop_word_filter import stop_word_filter

    words = query.lower().split()
    best = (0.0, None)
    for hit in index.search(" ".join(f"{word}*" for word in words)):
        matched = [*hit["match_data"].metadata]
        has = {word: any(one.startswith(word) for one in matched) for word in words}
        known = [found for word, found in has.items() if found or stop_word_filter(word)]
        weight = ("#" not in hit["ref"]) + sum(known) / len(known)
        best = max(best, (hit["score"] * (1 + weight**2), hit["ref"].partition(".html")[0]))
    return best[1]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_finds_its_page_first(index, query):
    assert first_page(index, query) in QUERIES[query].split("|")


def test_what_is_inside_is_not_found(index):
    assert not [hit for hit in index.search("partial*") if "inside" in hit["ref"]]
