"""`evenstep reproduce`: parts are measured once and kept, a run resumes, the report shows them."""

import base64
import dataclasses
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarking import FACTS
from commands import complaint, run
from evenstep.bench import fresh, machine
from evenstep.errors import InputError
from evenstep.limits import BOOK_EXPERIMENTS
from evenstep.reproduce import Experiment, Kept, Part, Row, Workplace, experiments
from evenstep.reproduce import run as measure
from evenstep.reproduce.report import page
from evenstep.reproduce.training import Training, choose_devices, timeline, train

SHARED = Path(__file__).parents[3] / "shared" / "data" / "fashion-mnist"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SMALL = Training(
    network="mlp", devices=2, batch_size=32, lr=0.1, epochs=3, base_batch_size=16, warmup_epochs=1
)


@pytest.fixture(autouse=True)
def _facts(monkeypatch):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, 28, 28, generator=generator) * 0.3
    images[torch.arange(count), 0, labels] += 1  # a bright row marks the class
    return TensorDataset(images, labels)


DATA = (examples(100), examples(40, seed=1))


def curve_of(training=SMALL, folder=None, say=lambda line: None):
    found = train(training, DATA, folder, say)
    assert json.loads(json.dumps(found)) == found
    return found


def test_a_training_has_one_result_on_one_device_and_on_two(tmp_path):
    two = curve_of(folder=tmp_path / "two")
    one = curve_of(dataclasses.replace(SMALL, devices=1), tmp_path / "one")
    assert one["fingerprint"] == two["fingerprint"]
    assert one["accuracies"] == two["accuracies"]
    assert len(two["accuracies"]) == len(two["seconds"]) == 3
    assert two["accuracies"][-1] > 0.2
    assert set(two["shares"]) == {"cpu:0", "cpu:1"}
    assert {span["device"] for span in two["timeline"]} <= {"cpu:0", "cpu:1"}
    assert sum(span["category"] == "compute" for span in two["timeline"]) == 8 + 8 + 4


@pytest.mark.parametrize("stopped_after", [1, 6])
def test_an_interrupted_training_goes_on_to_the_same_end(tmp_path, monkeypatch, stopped_after):
    """Stopped in the middle of an epoch and, with three more steps, in the next one."""
    from evenstep.reproduce import training as module

    expected = curve_of(folder=tmp_path / "whole")
    monkeypatch.setattr(module, "_SAVE_EVERY_S", 0.0)

    announced, steps = module._announced, []

    def interrupted(done_steps, total, say):
        for done in announced(done_steps, total, say):
            if done > stopped_after:
                raise KeyboardInterrupt
            yield done

    def noted(done_steps, total, say):
        for done in announced(done_steps, total, say):
            steps.append(done)
            yield done

    with monkeypatch.context() as patched:
        patched.setattr(module, "_announced", interrupted)
        with pytest.raises(KeyboardInterrupt):
            curve_of(folder=tmp_path / "stopped")
    monkeypatch.setattr(module, "_announced", noted)
    found = curve_of(folder=tmp_path / "stopped")
    assert steps[0] == stopped_after + 1
    assert found["fingerprint"] == expected["fingerprint"]
    assert found["accuracies"] == expected["accuracies"]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(0, 3), (1, ["cuda:0"] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"])],
)
def test_a_machine_with_fewer_gpus_trains_on_them_all_the_same(monkeypatch, gpus, expected):
    for module in ("evenstep.reproduce.training", "evenstep.devices.discovery"):
        monkeypatch.setattr(f"{module}.gpu_count", lambda: gpus)
    found = choose_devices(3)
    assert (found if isinstance(found, int) else [*map(str, found)]) == expected


def test_a_long_training_says_how_long_it_will_take(monkeypatch):
    from evenstep.reproduce import training as module

    now_s, said = iter(range(0, 1000, 6)), []
    clock = types.SimpleNamespace(perf_counter=lambda: next(now_s))
    monkeypatch.setattr(module, "time", clock)
    assert [*module._announced(iter(range(3, 8)), 13, said.append)] == [3, 4, 5, 6, 7]
    assert said == [
        "step 4 of 13, about 0:00:54 left",
        "step 6 of 13, about 0:00:42 left",
    ]


def test_a_timeline_without_steps_is_empty():
    assert timeline([], ["cpu:0"]) == []


# ---- what is kept


def make_experiment(measured, name="first", fails=()):
    def measure(key, place):
        if key in fails:
            raise KeyboardInterrupt
        measured.append(key)
        (place.folder / key).mkdir(parents=True)
        return {"figure": len(measured)}

    parts = [
        Part(key=key, label=key, measure=lambda place, key=key: measure(key, place))
        for key in (f"{name}.a", f"{name}.b")
    ]
    return Experiment(
        name=name,
        title=name.title(),
        section="8",
        question="Why < so?",
        lesson="That < is a sign.",
        parts=parts,
        rows=lambda figures: [Row(text="`x`", here=str(figures[f"{name}.b"]["figure"]), why="&")],
    )


def place_in(folder, said=None):
    say = [].append if said is None else said.append
    return Workplace(data=lambda: DATA, folder=folder / "unfinished", say=say)


def test_what_was_measured_is_not_measured_again(tmp_path):
    measured, done, said = [], [], []
    file = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        measure(
            [make_experiment(measured, fails=["first.b"])],
            Kept(file, "full"),
            place_in(tmp_path, said),
            done.append,
        )
    assert (measured, done) == (["first.a"], [])
    experiment = make_experiment(measured)
    measure([experiment], Kept(file, "full"), place_in(tmp_path, said), done.append)
    assert (measured, done) == (["first.a", "first.b"], [experiment])
    assert said == ["first: first.a", "first: first.b", "first: first.b"]
    assert not any((tmp_path / "unfinished").iterdir())
    measure([experiment], Kept(file, "full"), place_in(tmp_path), done.append)
    assert len(measured) == 2


def test_it_is_said_when_a_later_run_went_on(tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    first = make_experiment([])
    measure(
        [dataclasses.replace(first, parts=first.parts[:1])], Kept(file, "full"), place_in(tmp_path)
    )
    later = {"date_utc": "2025-01-03 00:00", "git_revision": "def"}
    monkeypatch.setattr(machine, "facts", lambda: {**FACTS, **later})
    measure([first, make_experiment([], "second")], Kept(file, "full"), place_in(tmp_path))
    found = json.loads(file.read_text())
    assert found["machine"] == FACTS
    assert found["went_on"] == [later]


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"size": "full"}', '{"size": "full", "parts": 3}', "[" * 100_000],
    ids=["empty", "list", "no parts", "a number of parts", "deep"],
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, content):
    (tmp_path / "figures.json").write_text(content)
    with pytest.raises(InputError, match="not a file of figures.*a different folder"):
        Kept(tmp_path / "figures.json", "full")


def test_figures_of_a_quick_run_are_not_taken_for_a_full_one(tmp_path):
    kept = Kept(tmp_path / "figures.json", "quick")
    measure([make_experiment([])], kept, place_in(tmp_path))
    with pytest.raises(InputError, match="figures of a quick run"):
        Kept(tmp_path / "figures.json", "full")


# ---- the report


class Page(html.parser.HTMLParser):
    """Everything that a page refers to, and whether its tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.cells, self.links, self.names = [], [], [], [], set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.sources += [found[name] for name in ("src",) if name in found]
        self.links += [found["href"]] if tag == "a" else []
        self.names |= {found["id"]} if "id" in found else set()
        if tag not in ("meta", "link", "img", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells.append(data)


def document(**parts):
    return {"size": "full", "machine": FACTS, "parts": parts}


def test_a_page_has_what_was_measured_and_names_the_rest():
    first, second = make_experiment([]), make_experiment([], "second")
    found = page([first, second], document(**{"first.a": {}, "first.b": {"figure": 7}}), "evenstep")
    parsed = Page(found)
    assert parsed.cells == ["x", "–", "7", "&"]
    assert "Not measured yet: Second." in found
    assert "Why &lt; so?" in found
    assert "What you learn:</strong> That &lt; is a sign." in found
    assert [link.removeprefix("#") for link in parsed.links] == ["first"]
    assert parsed.names == {"first"}


def made_up(size="full"):
    """Return figures for every part there is, of the form that measuring gives."""
    found = {}
    for experiment in experiments(size):
        for part in experiment.parts:
            found[part.key] = _made_up(part.key)
    return found


def _made_up(key):
    if key.startswith("splits."):
        number = {"round": int(key[-1]), "key": key.rpartition(".")[0]}
        figures = {"examples_per_s": 100.0, "weight_nbytes": 1000, "held_nbytes": 500}
        figures |= {"fingerprints": "f00d" * 16, "nbytes": 3e6, "meetings": 16.0}
        return {**number, **{name: [value] * 3 for name, value in figures.items()}}
    if ".round" in key:
        fields = ("seconds", "queued_s", "finished_s", "compute_s", "copy_s", "most_gain")
        more = ("peak_growth_bytes", "end_growth_bytes", "made_s")
        more += ("eager_us", "hybrid_us", "examples_per_s")
        number = int(key.rpartition("round")[2])
        return {"round": number, "key": key.rpartition(".")[0], **dict.fromkeys(fields + more, 2.0)}
    if key == "hybridize":
        return {"eager_us": 40.0, "hybrid_us": 20.0, "way": "a trace"}
    span = {"category": "compute", "name": "shard 0", "began_s": 0.0, "ended_s": 0.1}
    return {
        "accuracies": [0.1, 0.6, 0.7, 0.8125],
        "seconds": [3.0 / int(key[-1])] * 4 if key[-1].isdigit() else [1.0] * 4,
        "fingerprint": "f00d" * 16,
        "training": {"examples": None},
        "timeline": [{**span, "device": "cpu:0"}, {**span, "device": "cpu:1"}],
    }


def page_of(size):
    return page(experiments(size), document(**made_up(size)), "evenstep reproduce")


@pytest.fixture(scope="module")
def whole_page():
    return page_of("full")


@pytest.mark.parametrize("size", ["quick", "full"])
def test_every_experiment_has_its_rows_and_pictures(size, whole_page):
    found = whole_page if size == "full" else page_of(size)
    parsed = Page(found)
    assert "Not measured yet" not in found
    assert parsed.names == set(BOOK_EXPERIMENTS)
    assert len(parsed.sources) == 5
    for source in parsed.sources:
        picture = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
        assert picture.startswith("<?xml")
        assert "<path" in picture
    cells = dict(zip(parsed.cells, parsed.cells[2:], strict=False))
    assert found.count(">equal<") == 4
    assert found.count("<code>f00df00df00d…</code>") == 4
    assert "two devices over one" in cells
    assert cells["two devices over one"] == "2.00×"


def rows_of(name, figures, size="full"):
    (one,) = (one for one in experiments(size) if one.name == name)
    return {row.text: row for row in one.rows(figures)}


def test_a_difference_is_called_one():
    figures = made_up()
    figures["lenet.book.2"] = {**figures["lenet.book.2"], "fingerprint": "bad0" * 16}
    found = rows_of("lenet", figures)
    other = found["fingerprint, one device and two, the book's rate"]
    assert other.here == "DIFFERENT"
    assert other.why.startswith("`f00df00df00d…`, `bad0bad0bad0…`: the promise is broken")
    assert "every bit" not in other.why
    assert found["fingerprint, one device and two, improved"].here == "equal"


BOTH, NOTHING = "both devices", "nothing"


@pytest.mark.parametrize(
    ("name", "key", "field", "text", "gained", "lost"),
    [
        ("waiting", "waiting.add.engine.end", "seconds", "sums: gain", BOTH, NOTHING),
        ("waiting", "waiting.mm.engine.end", "seconds", "products: gain", BOTH, NOTHING),
        ("together", "together.engine.together", "seconds", "gain", "Two CPU", "not faster"),
        ("copies", "copies.thin.engine.together", "seconds", "thin: gain", "hidden", NOTHING),
        ("queued", "queued", "finished_s", "the first over the second", "no time", "a good part"),
    ],
)
def test_an_explanation_is_that_of_the_measured_value(name, key, field, text, gained, lost):
    """The figures are 2.0 s each, but for the divisor: 0.01 or 100 times as much."""
    told = {}
    for factor in (0.01, 100):
        figures = made_up()
        for part in figures:
            if part.startswith(f"{key}.round"):
                figures[part] = {**figures[part], field: 2.0 * factor}
        told[factor] = rows_of(name, figures)[text].why
    assert gained in told[100 if name == "queued" else 0.01]
    assert lost in told[0.01 if name == "queued" else 100]
    assert not any(gained in why and lost in why for why in told.values())


def test_a_remedy_that_did_not_help_is_not_called_one():
    figures = made_up()
    helped = rows_of("sixteen", figures)
    figures["sixteen.root"] = {**figures["sixteen.root"], "accuracies": [0.1] * 4}
    did_not = rows_of("sixteen", figures)
    (text,) = (text for text in helped if "square-root" in text)
    assert "remedy" in helped[text].why
    assert "has not helped" in did_not[text].why


def test_a_speed_up_below_one_is_no_gain():
    figures = made_up()
    figures["lenet.book.2"] = {**figures["lenet.book.2"], "seconds": [6.0] * 4}
    row = rows_of("lenet", figures)["two devices over one"]
    assert row.here == "0.500×"
    assert "gained nothing" in row.why


def test_accuracies_of_a_quick_run_are_marked_and_explain_nothing(whole_page):
    for name in ("lenet", "resnet18", "sixteen"):
        rows = rows_of(name, made_up("quick"), "quick").items()
        accuracies = [row for text, row in rows if "accuracy after" in text]
        assert accuracies
        for row in accuracies:
            assert row.here.endswith(" (quick)")
            assert row.why == "Quick run: few examples and epochs; accuracies are no result."
    assert "(quick)" not in whole_page


def test_the_same_figures_make_the_same_page(whole_page):
    assert page_of("full") == whole_page


def test_the_trainings_are_those_of_the_book():
    parts = {part.key: part for one in experiments("full") for part in one.parts}
    book = {key: parts[key].measure.args[1] for key in parts if ".book." in key}
    assert {key: (one.devices, one.batch_size, one.lr, one.init) for key, one in book.items()} == {
        "lenet.book.1": (1, 256, 0.2, "book"),
        "lenet.book.2": (2, 256, 0.2, "book"),
        "resnet18.book.1": (1, 256, 0.1, "book"),
        "resnet18.book.2": (2, 512, 0.2, "book"),
    }
    sixteen = [parts[key].measure.args[1] for key in parts if key == "sixteen.root"]
    assert [(one.shards, one.batch_size) for one in sixteen] == [(16, 4096)]


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "alexnet"), "choose some of hybridize, queued"),
        (("--only", "lenet", "--data-dir", "nowhere"), "is missing in"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    assert message in complaint("reproduce", "--out", tmp_path / "out", *arguments, code=2)


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    line = complaint("reproduce", "--only", "queued", "--out", tmp_path / "file" / "x", code=2)
    assert "got --out" in line


def test_a_measurement_that_fails_is_one_line(tmp_path, monkeypatch):
    def fails(*arguments, **more):
        raise fresh.RunFailedError("queued failed (1)", "RuntimeError: no")

    monkeypatch.setattr(fresh, "run_module", fails)
    out = tmp_path / "out"
    result = run("reproduce", "--only", "queued", "--quick", "--out", out, code=1)
    assert result.stderr.splitlines()[1:] == ["evenstep: a measurement failed: RuntimeError: no"]


def test_only_measures_what_is_asked_for_and_writes_the_report(tmp_path, monkeypatch):
    figures = {"queued_s": 0.001, "finished_s": 0.1}
    monkeypatch.setattr(fresh, "run_module", lambda *_, **__: figures)
    out = tmp_path / "out"
    result = run("reproduce", "--only", "queued", "--quick", "--out", out)
    assert "queued: the first over the second: 1.00% (the book: 0.396%)" in result.stdout
    assert str(out / "report.html") in result.stdout
    parsed = Page((out / "report.html").read_text())
    assert parsed.names == {"queued"}
    assert list(json.loads((out / "figures.json").read_text())["parts"]) == ["queued.round0"]


def test_a_quick_run_trains_little_and_a_full_one_as_the_book_does():
    quick = {part.key: part for one in experiments("quick") for part in one.parts}
    for key in ("lenet.book.1", "resnet18.improved.2", "sixteen.root"):
        training = quick[key].measure.args[1]
        assert training.epochs == 2
        assert training.examples == {"lenet": 5120, "resnet18": 256}[training.network]
        assert training.warmup_epochs < training.epochs


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the data set is not in {SHARED}")
def test_all_of_a_quick_run_looked_at_in_a_browser(tmp_path):
    """No error on the page, every picture loads; less than five minutes on two cores alone."""
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "evenstep", "reproduce", "--quick"),
            *("--data-dir", SHARED, "--out", out),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    took_s = float(re.search(r"took (\d+) s", done.stdout)[1])
    cores = len(os.sched_getaffinity(0)) / int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert took_s < 300 * max(1, 2 / cores)
    text = (out / "report.html").read_text()
    assert Page(text).names == set(BOOK_EXPERIMENTS)
    assert "DIFFERENT" not in text
    assert text.count(">equal<") == 4
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: the page was not looked at in a browser")
    script = """<script>
      addEventListener("error", event => document.title += " broken", true);
      addEventListener("load", () => {
        const loaded = [...document.images].filter(image => image.naturalWidth > 0).length;
        const wide = document.documentElement.scrollWidth > innerWidth;
        document.title = `${loaded} of ${document.images.length} pictures, ${wide}`;
      });
    </script></head>"""
    looked_at = tmp_path / "looked_at.html"
    looked_at.write_text(text.replace("</head>", script))
    browser = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,900"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"),
            looked_at.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "<title>5 of 5 pictures, false</title>" in browser.stdout
    assert "CONSOLE" not in browser.stderr
