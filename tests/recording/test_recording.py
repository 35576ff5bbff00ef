"""Recording changes no bit of a run, keeps what it says, and ends with what it had."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooks_of_optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook

import evenstep
import warm
from commands import run
from evenstep.comparison import Cause, compare, read_run
from evenstep.errors import InputError
from good_models import MODELS

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    x = torch.randn(6, 4)
    nn.functional.cross_entropy(model(x), torch.arange(6) % 3).backward()
    optimizer.step()
print(sum(one.double().sum().item() for one in model.parameters()).hex())
"""
FRESH = {key: value for key, value in os.environ.items() if not key.startswith("COV")}


def gradients(recipe, model, optimizer, batch):
    """Compute the gradients of a batch; return its loss."""
    optimizer.zero_grad()
    if recipe.objective is not None:
        total, count = recipe.objective(model, *batch)
        loss = total / count
    else:
        *inputs, target = batch
        loss = recipe.loss(model(*inputs), target)
    loss.backward()
    return loss


def trained(name, recording):
    """Train a model in plain torch; return its state and the state of torch's generator."""
    torch.manual_seed(0)
    recipe = MODELS[name]
    model = recipe.make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    with recording:
        for _ in range(3):
            closure = functools.partial(gradients, recipe, model, optimizer, recipe.make_batch(16))
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


QUICK = sorted(MODELS)[::9]


@pytest.mark.parametrize("level", ["step", "module", "operator"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(MODELS)],
)
@pytest.mark.thinned(3, 4)
def test_a_recorded_run_has_the_bits_of_one_that_is_not(name, level, tmp_path):
    expected = trained(name, contextlib.nullcontext())
    found = trained(name, evenstep.record(tmp_path / "it.rec", level=level))
    assert all(map(torch.equal, found, expected))
    assert read_run(tmp_path / "it.rec").steps == 3
    assert trained(name, contextlib.nullcontext())  # nothing stays behind


def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "evenstep", *map(str, arguments)],
        capture_output=True, text=True, check=False, env=FRESH, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_is_recorded_and_compared_by_the_command_line(tmp_path):
    path = script(tmp_path)
    plain = subprocess.run(
        [sys.executable, path, "1", "4"], capture_output=True, text=True, check=True
    )
    for seed in (1, 2):
        done = command("record", "--out", tmp_path / f"{seed}.rec", path, seed, 4)
        assert done.returncode == 0, done.stderr
        if seed == 1:
            assert done.stdout == plain.stdout
    compared = command("compare", tmp_path / "1.rec", tmp_path / "2.rec")
    assert compared.returncode == 1
    assert compared.stdout.startswith("they begin with different weights\n")
    same = command("compare", tmp_path / "1.rec", tmp_path / "1.rec")
    assert (same.returncode, same.stdout.splitlines()[0]) == (0, "they are equal to the bit")


def test_the_exit_code_is_that_of_the_script(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nsys.exit(7)\n")
    done = command("record", "--out", tmp_path / "it.rec", path)
    assert done.returncode == 7
    assert "no model was called" in done.stderr


def test_a_script_that_ends_by_a_signal_has_its_exit_code(tmp_path):
    path = tmp_path / "dies.py"
    path.write_text("import os\nos.kill(os.getpid(), 11)\n")
    assert command("record", "--out", tmp_path / "it.rec", path).returncode == 128 + 11


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_script_may_take_its_time_to_end_by_a_signal(sent, tmp_path):
    path = tmp_path / "saves.py"
    path.write_text(
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(1)\n    print('saved', flush=True)\n    sys.exit(7)\n"
        "signal.signal(signal.SIGINT, stop)\nsignal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    started = [sys.executable, "-m", "evenstep", "record", "--out", tmp_path / "it.rec", path]
    with subprocess.Popen(
        [*map(str, started)], stdout=subprocess.PIPE, text=True, env=FRESH, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        send = os.killpg if sent == signal.SIGINT else os.kill  # the first is Ctrl-C
        send(process.pid, sent)
        assert process.stdout.read() == "saved\n"
    assert process.returncode == 7


def test_a_fork_does_not_end_the_record(tmp_path):
    with evenstep.record(tmp_path / "it.rec"):
        train_a_step(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        recorder = next(iter(hooks_of_optimizers._global_optimizer_post_hooks.values())).__self__
        child = os.fork()
        if not child:
            recorder.stop()
            os._exit(0)
        os.waitpid(child, 0)
    (file,) = (tmp_path / "it.rec").iterdir()
    assert file.read_text().count('"what":"end"') == 1


def train_a_step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.slow
def test_a_script_has_the_environment_that_the_user_has_set(tmp_path):
    path = tmp_path / "prints.py"
    path.write_text("import os\nimport torch\nprint(*sorted(os.environ), sep='\\n')\n")
    env = {name: value for name, value in FRESH.items() if not name.startswith("CUBLAS")}
    said = [
        subprocess.run(
            [sys.executable, *begin, path], capture_output=True, text=True, check=False, env=env
        ).stdout.split()
        for begin in ((), ("-m", "evenstep", "record", "--out", tmp_path / "it.rec"))
    ]
    more = {*said[1]} - {*said[0]}
    assert "EVENSTEP_RECORD" in more
    assert more <= {"EVENSTEP_RECORD", "EVENSTEP_RECORD_PATH", "PYTHONPATH"}


@pytest.mark.slow
def test_a_script_without_an_optimizer_is_told_so(tmp_path):
    path = tmp_path / "by_hand.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\nfor _ in range(3):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
    )
    done = command("record", "--out", tmp_path / "it.rec", path)
    assert done.returncode == 0
    assert "no optimizer of torch.optim made an update in" in done.stderr
    compared = command("compare", tmp_path / "it.rec", tmp_path / "it.rec")
    assert compared.returncode == 2
    assert "holds no update of an optimizer of torch.optim" in compared.stderr


@pytest.mark.slow
def test_the_users_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.was_there = True\n")
    path = tmp_path / "train.py"
    path.write_text("print(was_there)\n" + SCRIPT)
    env = {**FRESH, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "record", "--out", tmp_path / "it.rec", path, "1", "2"],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert done.stdout.startswith("True\n")
    assert read_run(tmp_path / "it.rec").steps == 2


@pytest.mark.slow
def test_a_script_that_asks_for_torch_before_it_imports_it_is_recorded(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import importlib.util\nassert importlib.util.find_spec('torch')\n" + SCRIPT)
    done = command("record", "--out", tmp_path / "it.rec", path, 1, 2)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "it.rec").steps == 2


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_compiled_model_is_one_graph_with_the_same_bits(backend, tmp_path):
    path = tmp_path / "train.py"
    compiled = f"\nmodel = torch.compile(model, backend={backend!r}, fullgraph=True)\noptimizer"
    path.write_text(SCRIPT.replace("nn.Dropout(0.2), ", "").replace("\noptimizer", compiled, 1))
    plain = subprocess.run(
        [sys.executable, path, "1", "3"], capture_output=True, text=True, check=True, env=FRESH
    )
    done = command("record", "--out", tmp_path / "it.rec", path, 1, 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    (process,) = read_run(tmp_path / "it.rec").processes
    assert [len(step.examples) for step in process.steps] == [6, 6, 6]


def record_of(tmp_path, trained=4, **options):
    """Record a short training here; return the path."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = tmp_path / f"{len([*tmp_path.iterdir()])}.rec"
    with evenstep.record(folder, **options):
        for _ in range(trained):
            nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return folder


def test_no_more_steps_are_recorded_than_asked_for(tmp_path):
    assert read_run(record_of(tmp_path, 5, steps=2)).steps == 2
    assert read_run(record_of(tmp_path, 6, steps=2, every=2)).steps == 2


def test_a_recording_that_ends_within_an_update_leaves_the_hooks_of_others(tmp_path):
    """Torch goes over the hooks of all optimizers while the last recorded update ends."""
    seen, handle = [], None
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.record(tmp_path / "it.rec", steps=2):
        handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
        for _ in range(4):
            nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
            optimizer.step()
    handle.remove()
    assert len(seen) == 4
    assert read_run(tmp_path / "it.rec").steps == 2
    assert not hooks_of_optimizers._global_optimizer_post_hooks
    assert not hooks_of_optimizers._global_optimizer_pre_hooks


@pytest.mark.parametrize("devices", [1, 2])
def test_a_training_of_evenstep_goes_on_behind_its_recording(tmp_path, devices):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        evenstep.record(tmp_path / "it.rec", steps=2),
        evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer,
    ):
        for _ in range(4):
            trainer.step(torch.randn(16, 4), torch.arange(16) % 3)
    assert read_run(tmp_path / "it.rec").steps == 2


def test_a_record_that_was_cut_off_holds_the_steps_before(tmp_path):
    folder = record_of(tmp_path)
    (file,) = folder.iterdir()
    whole = shutil.copytree(folder, tmp_path / "whole.rec")
    content = file.read_bytes()
    last = content.rindex(b'{"what":"before update"')
    file.write_bytes(content[: last + 40])
    assert (read_run(folder).steps, read_run(whole).steps) == (3, 4)
    assert compare(folder, folder).cause is Cause.NOTHING
    finding = compare(folder, whole)
    assert finding.cause is Cause.NOTHING  # and not that one makes more updates
    assert finding.evidence[1] == f"{folder} has 3 updates, {whole} 4"


@pytest.mark.parametrize("content", [
    b"", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"evenstep record":1}\n', b"{" * 100_000 + b"\n",
    b'{"evenstep record":2,"rank":"x","command":[],"launched":[],"facts":{}}\n',
    b'{"evenstep record":2,"rank":0,"command":[],"launched":[],"facts":{}}\n{"what":"update"}\n',
    b'{"evenstep record":2,"rank":0,"command":[],"launched":[],"facts":{}}\n[]\n',
    b'{"evenstep record":2,"rank":0,"command":[],"launched":[],"facts":{}}\n',
])  # fmt: skip
def test_what_is_no_record_gets_one_line(tmp_path, content):
    (tmp_path / "process-0.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=re_of(tmp_path)):
        read_run(tmp_path)
    done = run("compare", tmp_path, tmp_path, code=2)
    assert len(done.stderr.splitlines()) == 1


def edited(folder, what, change):
    """Change the first event of a kind in a record."""
    (file,) = folder.iterdir()
    events = [*map(json.loads, file.read_text().splitlines())]
    change(next(event for event in events if event.get("what") == what))
    file.write_text("".join(f"{json.dumps(event)}\n" for event in events))


def no_name(event):
    event["parameters"][1] = -1


def endless(event):
    next(iter(event["weights"].values()))[2][0] = float("inf")


def endless_pick(event):
    event["picked"] = float("inf")


@pytest.mark.parametrize(
    ("what", "change"),
    [("before update", no_name), ("model", endless), ("call", endless_pick)],
)
def test_a_record_that_was_edited_gets_one_line(tmp_path, what, change):
    folder = record_of(tmp_path)
    edited(folder, what, change)
    with pytest.raises(InputError, match=rf"{folder}.* is damaged"):
        compare(folder, folder)


def re_of(path):
    return f"{path}.* (is damaged|holds no update|has a line)"


def test_a_folder_that_is_no_record_gets_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", tmp_path / ("x" * 300), script(tmp_path)):
        with pytest.raises(InputError, match="is no record"):
            read_run(path)


def test_a_record_is_not_written_over(tmp_path):
    (tmp_path / "it.rec").mkdir()
    done = run("record", "--out", tmp_path / "it.rec", "train.py", code=2)
    assert "it.rec exists" in done.stderr


@pytest.mark.parametrize("name", ["no-such-program", "no-such-script.py"])
def test_a_command_that_is_not_there_gets_one_line(tmp_path, name):
    done = run("record", "--out", tmp_path / "it.rec", name, code=2)
    assert len(done.stderr.splitlines()) == 1


def test_a_killed_script_leaves_what_it_had(tmp_path):
    path = tmp_path / "killed.py"
    ended = f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    path.write_text(SCRIPT + ended)
    done = command("record", "--out", tmp_path / "it.rec", path, 1, 3)
    assert done.returncode == 128 + signal.SIGKILL
    assert read_run(tmp_path / "it.rec").steps == 3


@pytest.mark.slow
def test_a_file_that_would_grow_too_large_ends(tmp_path):
    path = script(tmp_path)
    path.write_text(SCRIPT.replace("nn.Linear(4, 8)", "nn.Linear(4, 8), *[nn.Identity()] * 3000"))
    done = command("record", "--out", tmp_path / "it.rec", "--limit-mb", 1, path, 1, 4)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "it.rec").iterdir()
    assert file.stat().st_size <= 1 << 20
    assert json.loads(file.read_text().splitlines()[-1]) == {"what": "full"}
    assert f"{file} ends here: it has reached its largest size" in done.stderr


@pytest.mark.parametrize("most", [0, pytest.param(15_000, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_ends_the_record_and_not_the_training(tmp_path, most):
    """A limit on the size of files stands for it: a part is written, or nothing."""
    path = script(tmp_path)
    plain = warm.run(path, 1, 9)
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
    begun = "for step in"  # an optimizer imports parts of torch that write files
    path.write_text(SCRIPT.replace(begun, limit + begun))
    done = command("record", "--out", tmp_path / "it.rec", path, 1, 9)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    (file,) = (tmp_path / "it.rec").iterdir()
    assert f"{file} ends here: " in done.stderr
    if most:
        assert len(done.stderr.splitlines()) == 2
        assert 1 <= read_run(tmp_path / "it.rec").steps < 9
    else:
        assert "made an update" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("record", "--out", tmp_path / "file" / "it.rec", script(tmp_path), 1, 1, code=2)
    assert "can't be made (Not a directory)" in done.stderr


@pytest.mark.parametrize(("level", "draws"), [("module", 3), ("operator", 5)])
def test_how_often_random_numbers_are_drawn_is_noted(tmp_path, level, draws):
    """Noted are two layers and the model; and two operators, if operators are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.record(tmp_path / "it.rec", level=level, steps=1):
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    (process,) = read_run(tmp_path / "it.rec").processes
    assert sum(bool(call.drew) for call in process.steps[0].calls) == draws
