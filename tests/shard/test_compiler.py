"""`Experiment(compile=True)`: compiled shards keep the promise, or a line says why not."""

import functools
import logging
import os
import random
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.data import Cursor, Loader
from evenstep.errors import ContractError, ModelError, NonFiniteLossError
from evenstep.shard import compile_policy, compiler
from evenstep.shard.compiler import NotCompiledError, ShardCompiler
from evenstep.shard.loss import choose_objective
from layouts import LAYOUTS, DelayedLanes, own
from marks import slow
from patience import wait
from trainers import open_trainer
from zoo import ZOO, Recomputed, SparseInPlaces, build, make_batches, options_of

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
LOSS = nn.CrossEntropyLoss()
SIZES = (20, 16)  # shards of 3 and 2 examples, and of 2
EAGER = {"branching": "data-dependent", "recurrent": "LSTM|named_modules"}
QUICK = ("convolution",)
FEW = ("1 shared", "2 shared", "3 mixed")


if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
    pytest.skip("this torch is too old to compile shards", allow_module_level=True)


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """Time only one call, and clear Dynamo's caches after each test."""
    monkeypatch.setattr(compile_policy, "_MEASURED_S", 0.0)
    yield
    torch._dynamo.reset()


def opened(model, *loss, **options):
    optimizer = options.pop("optimizer", None) or ADAM(model.parameters())
    return open_trainer(
        model, *loss, optimizer=optimizer, **{"compile": True, **options_of(model), **options}
    )


def train(model, batches, *loss, **options):
    """Train; return the fingerprint, the losses and the result of compiling."""
    with opened(model, *loss, **{"lanes": DelayedLanes, **options}) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in batches]]
        return trainer.fingerprint(), losses, trainer.hybridized


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else slow(name) for name in ZOO if name not in EAGER],
)
def test_compiled_shards_have_the_same_bits_on_every_layout(name):
    sizes = SIZES if name == "convolution" else SIZES[:1]
    results = [
        train(build(name), make_batches(sizes), devices=LAYOUTS[layout], max_in_flight=flight)
        for layout, flight in zip(FEW, (1, 2, 1), strict=True)
    ]
    assert not results[0][2].why_not
    assert len({(fingerprint, *losses) for fingerprint, losses, _ in results}) == 1
    assert results[0][2].max_difference < 1e-5
    _, eagerly, _ = train(build(name), make_batches(sizes), compile=False)
    assert results[0][1] == pytest.approx(eagerly, rel=1e-3)


@pytest.mark.parametrize("name", EAGER)
def test_a_model_that_cannot_be_compiled_is_trained_eagerly_and_a_line_says_why(name, caplog):
    fingerprint, _, result = train(build(name), make_batches(SIZES))
    assert re.search(EAGER[name], result.why_not)
    lines = [record.message for record in caplog.records if record.name == "evenstep"]
    (line,) = [line for line in lines if "separable" not in line]
    assert line == f"compile: shards are computed eagerly, because {result.why_not}"
    assert "\n" not in line
    assert fingerprint == train(build(name), make_batches(SIZES), compile=False)[0]


def made(forward):
    """Return a model with a layer, and `forward(layer, x)`."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(36, 5)

        def forward(self, x):
            return forward(self.layer, x.flatten(1))

    return Made()


def printing(layer, x):
    print("here")
    return layer(x)


def drawing(layer, x):
    return layer(x) * random.random()


def in_place(layer, x):
    hidden = x.clone()
    hidden += 1
    hidden[:, 0] = 0
    return layer(hidden)


def looping(layer, x):
    return torch.stack([layer(row) for row in x])


@pytest.mark.parametrize(("forward", "where"), [(printing, "`print`"), (drawing, "Random.random")])
def test_python_side_effects_make_shards_eager(forward, where, capsys):
    result = train(made(forward), make_batches((16,)), check="off")[2]
    assert where in result.why_not
    assert f"in {forward.__name__}" in result.why_not or "one number" in result.why_not
    assert (capsys.readouterr().out.count("here") >= 8) == (forward is printing)  # every shard


PROGRAMS = {  # and how far their losses may be from eager ones
    "in place": (lambda: made(in_place), 1e-5),
    "a loop": (lambda: made(looping), 1e-5),
    "recomputed layers that share a weight": (Recomputed, 1e-4),
}


@pytest.mark.parametrize("name", [one if one == "in place" else slow(one) for one in PROGRAMS])
def test_what_is_part_of_the_program_is_compiled_and_right(name):
    make, tolerance = PROGRAMS[name]

    def run(**options):
        return train(make(), make_batches((16, 16)), **options)

    one, two, eagerly = run(devices=1), run(devices=own(3)), run(compile=False)
    assert not one[2].why_not
    assert one[:2] == two[:2]
    assert one[1] == pytest.approx(eagerly[1], rel=tolerance)


class Keeping(nn.Module):
    """Keeps a running mean in an attribute, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = nn.Linear(36, 5), torch.zeros(())

    def forward(self, x):
        hidden = self.layer(x.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean()
        return hidden + self.mean


class Assigning(nn.Module):
    """Assigns its running mean to a buffer, and subtracts it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(36, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        hidden = self.layer(x.flatten(1)) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        return hidden


def test_what_forward_assigns_to_a_buffer_is_its_value_after_the_step():
    def run(**options):
        model = Assigning()
        with opened(model, **options) as trainer:
            losses = [float(trainer.step(*batch)) for batch in make_batches((16, 16, 16))]
            return losses, model.mean.clone(), trainer.fingerprint()

    one, two, eagerly = run(), run(devices=own(2)), run(compile=False)
    assert one[1].abs().max() > 0.01
    assert one[2] == two[2]
    torch.testing.assert_close(one[1], eagerly[1])
    assert one[0] == pytest.approx(eagerly[0], rel=1e-5)


def hooked_layer():
    model = build("convolution")
    model[1].register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Keeping, "forward keeps a tensor somewhere besides returning it"),
        (SparseInPlaces, "the layer table has sparse gradients"),
        (hooked_layer, "the layer 1 has hooks on its backward pass"),
    ],
)
def test_what_a_compiled_backward_pass_would_leave_out_makes_shards_eager(make, why):
    model = make()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(model, optimizer=sgd, check="off") as trainer:
        trainer.step(*make_batches((16,))[0])
        assert why in trainer.hybridized.why_not


def test_the_line_says_what_is_gained_and_compiling_does_not_count_as_step_time(caplog):
    caplog.set_level(logging.WARNING, "evenstep")
    with opened(build("convolution")) as t:
        t.step(*make_batches((32,))[0])
        result, spent = t.hybridized, t.shares()
    assert result.shard_ms > 0
    assert result.eager_ms > 0
    assert result.max_difference < 1e-6
    assert t.compile_s == result.compile_s > sum(own.wall_s for own in spent)
    (line,) = [record.message for record in caplog.records if record.name == "evenstep"]
    assert "ms compiled and" in line
    assert "max difference of the gradients" in line
    assert ("does not pay here" in line) == (result.shard_ms >= result.eager_ms)


@pytest.fixture
def recompiles_are_explained():
    """Dynamo says on stderr which guard has failed."""
    torch._logging.set_logs(recompiles=True)
    yield
    torch._logging.set_logs()


@pytest.mark.usefixtures("recompiles_are_explained")
@pytest.mark.slow
def test_only_the_thread_that_begins_steps_compiles(monkeypatch, tmp_path):
    from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing was compiled before
    threads, compiled = set(), []
    real = compile_fx.compile_fx

    def counted(*arguments):
        threads.add(threading.current_thread())
        compiled.append(real(*arguments))  # or torch raises, to trace again with numbers as tensors
        return compiled[-1]

    monkeypatch.setattr(compile_fx, "compile_fx", counted)
    train(build("convolution"), make_batches(SIZES), devices=3, max_in_flight=2)
    assert len(compiled) == len({3, 2})  # the sizes of the shards
    assert threads == {threading.main_thread()}


@pytest.mark.slow
def test_each_size_flag_and_attribute_value_has_one_program():
    def run(devices):
        model = build("dropout")
        with opened(model, devices=devices) as trainer:
            counts = []
            for batch in make_batches((16, 16)):
                for rate, learns, training in (
                    (0.5, True, True),
                    (0.2, True, True),
                    (0.2, False, True),
                    (0.2, True, False),
                ):
                    model[2].p = rate
                    model[1].weight.requires_grad_(learns)
                    model.train(training)
                    trainer.step(*batch)
                    counts.append(trainer._executor.programs._compiler.compiled)
            return trainer.fingerprint(), counts

    (one, counts), (three, _) = run(1), run(own(3))
    assert one == three
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.slow
def test_draws_depend_on_seed_step_and_shard_and_leave_the_default_generator_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = train(build("noisy"), make_batches(SIZES), seed=1)[0]
    torch.manual_seed(3)
    assert before.equal(torch.random.get_rng_state())
    model = build("noisy")
    torch.manual_seed(3)
    again = train(model, make_batches(SIZES), seed=1, devices=3)[0]
    assert before.equal(torch.random.get_rng_state())
    assert first == again
    assert first != train(build("noisy"), make_batches(SIZES), seed=2)[0]


@pytest.mark.slow
def test_class_weights_may_be_another_tensor_at_every_step():
    def run(compiled):
        loss = nn.CrossEntropyLoss(weight=torch.ones(5))

        def objective(model, X, y):
            return nn.functional.cross_entropy(
                model(X), y, weight=loss.weight, reduction="sum"
            ), loss.weight[y].sum()

        model = build("convolution")
        losses = []
        with opened(model, objective=objective, compile=compiled) as trainer:
            for number, batch in enumerate(make_batches((16, 16, 16))):
                loss.weight = torch.linspace(1, 2 + number, 5)
                losses.append(float(trainer.step(*batch)))
        return losses

    assert run(True) == pytest.approx(run(False), rel=1e-5)


def penalised(parameters_of):
    """Train with a penalty on the parameters that `parameters_of(model, outer, listed)` returns."""
    outer = build("convolution")
    listed = list(outer.parameters())

    def objective(model, X, y):
        penalty = sum(p.square().sum() for p in parameters_of(model, outer, listed))
        return nn.functional.cross_entropy(model(X), y, reduction="sum") + penalty, len(y)

    return train(outer, make_batches((16, 16)), objective=objective, separable=False)


@pytest.mark.slow
def test_a_compiled_objective_must_not_call_the_users_own_module_or_hold_its_parameters():
    penalised(lambda model, outer, listed: model.parameters())
    with pytest.raises(ContractError, match="parameters of the model itself"):
        penalised(lambda model, outer, listed: outer.parameters())
    with pytest.raises(ModelError, match="must call the model that it is given"):
        penalised(lambda model, outer, listed: listed)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(36, 5), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x.flatten(1)) * (1 + 0.001 * self.calls)  # within the guard of rounding


@pytest.mark.slow
def test_a_counter_in_forward_is_refused_instead_of_compiling_endlessly(monkeypatch):
    monkeypatch.setattr(compiler, "_MOST_PROGRAMS", 3)
    with pytest.raises(ModelError, match="has compiled 3 programs, and needs another one.*counter"):
        train(Counting(), make_batches((16,) * 6), check="off")


def compiler_of(model):
    return ShardCompiler(model, choose_objective(LOSS, None), 1, None)


def arguments_of(model):
    return [parameter.detach() for parameter in model.parameters()], list(model.buffers())


@pytest.mark.slow
def test_a_tensor_of_another_kind_never_reaches_compiled_code():
    model = build("convolution")
    (batch,) = make_batches((6,))
    X, y = batch
    program = compiler_of(model).program(batch, examples=len(X))
    expected = program.run(*arguments_of(model), batch)
    for wrong in ((X[:5], y[:5]), (X, y.int()), (X.double(), y)):
        with pytest.raises(ModelError, match="a shard has"):
            program.run(*arguments_of(model), wrong)
    strided = X.expand(2, *X.shape).transpose(0, 1).contiguous()[:, 1]  # other strides, same values
    assert strided.stride() != X.stride()
    found = program.run(*arguments_of(model), (strided, y))
    assert all(map(torch.equal, found.gradients, expected.gradients))


def test_gradients_have_their_parameters_strides_and_memory_of_their_own():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4, 3).t()), nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            return x.sum() + (self.a + self.b).sum()

    model = Plain()
    objective = choose_objective(None, lambda model, X: (model(X), len(X)))
    program = ShardCompiler(model, objective, 1, None).program((torch.ones(2),), examples=2)
    first, second = (program.run(*arguments_of(model), (torch.ones(2),)) for _ in range(2))
    for outcome in (first, second):
        for gradient, parameter in zip(outcome.gradients, model.parameters(), strict=True):
            assert gradient.stride() == parameter.stride()
            assert gradient.equal(torch.ones(3, 4))
    memories = {g.untyped_storage().data_ptr() for o in (first, second) for g in o.gradients}
    assert len(memories) == 4


@pytest.mark.parametrize("wrong", [lambda g: g + 0.02, lambda g: g * torch.nan, lambda g: None])
def test_a_compiler_that_is_wrong_makes_shards_eager(wrong, monkeypatch, caplog):
    """Torch's was, where it found a program made for another processor."""
    right = compiler.Program.run

    def run(*arguments, **options):
        outcome = right(*arguments, **options)
        outcome.gradients[1] = wrong(outcome.gradients[1])
        return outcome

    monkeypatch.setattr(compiler.Program, "run", run)
    compiled = train(build("convolution"), make_batches(SIZES))
    assert "torch's compiler is wrong here" in compiled[2].why_not
    assert compiled[2].why_not in caplog.text
    assert compiled[:2] == train(build("convolution"), make_batches(SIZES), compile=False)[:2]


def test_an_old_torch_is_a_reason(monkeypatch):
    monkeypatch.setattr(compiler, "_SETTINGS", {"no_such_setting": True})
    with pytest.raises(NotCompiledError, match="is too old for it"):
        compiler_of(build("convolution"))


def digits_like():
    X, y = make_batches((70,))[0]
    return Loader(TensorDataset(X, y), 16, seed=3)


def steps(trainer, count):
    """Take steps from the trainer's position on."""
    while count:
        for batch in trainer.epoch(digits_like()):
            trainer.step(*batch)
            count -= 1
            if not count:
                return


def resumed(folder, model, **options):
    return evenstep.Trainer.load(folder, model, ADAM(model.parameters()), LOSS, **options)


@pytest.mark.slow
def test_training_resumes_with_the_same_bits_on_other_devices(tmp_path):
    with opened(build("dropout"), devices=1) as whole:
        steps(whole, 9)
    with opened(build("dropout")) as first:
        steps(first, 4)  # the next batch is the short last one
        first.save(tmp_path)
    with resumed(tmp_path, build("dropout"), devices=3) as second:
        steps(second, 5)
        assert not second.hybridized.why_not
    assert second.fingerprint() == whole.fingerprint()


def compiled_in_a_process(cache, model, **environment):
    """Return the hits of inductor's cache, and the gradients' difference, of a first step."""
    script = (
        "import sys, torch, evenstep\n"
        "from torch._dynamo.utils import counters\n"
        f"torch.manual_seed(0)\nmodel = {model}\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loss = torch.nn.CrossEntropyLoss()\n"
        "compiled = evenstep.Experiment(compile=True)\n"
        "with evenstep.Trainer(model, optimizer, loss, devices=1, experiment=compiled) as t:\n"
        "    t.step(torch.randn(16, 1, 28, 28), torch.zeros(16).long())\n"
        "    result = t.hybridized\n"
        "print(counters['inductor']['fxgraph_cache_hit'], result.max_difference, result.why_not)\n"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    hits, difference, *why_not = run.stdout.split(maxsplit=2)
    return int(hits), float(difference), " ".join(why_not)


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_compiled(tmp_path):
    hits = [compiled_in_a_process(tmp_path, "evenstep.models.mlp()")[0] for _ in range(2)]
    assert hits == [0, 1]


@pytest.mark.slow
def test_no_program_for_vectors_of_another_width_is_found(tmp_path):
    """Inductor itself takes it, and its garbage is no rounding: some 1e30."""
    model = "torch.nn.Sequential(evenstep.models.lenet(), torch.nn.BatchNorm1d(10))"
    for capability in ("avx512", "avx2", "default"):
        found = compiled_in_a_process(tmp_path, model, ATEN_CPU_CAPABILITY=capability)
        assert found == (0, pytest.approx(0, abs=1e-3), "")


@pytest.mark.slow
def test_autocast_is_compiled_too():
    one, two = (
        train(build("convolution"), make_batches((33,)), devices=n, precision="bf16")
        for n in (1, 3)
    )
    assert not one[2].why_not
    assert one[:2] == two[:2]
    assert one[0] != train(build("convolution"), make_batches((33,)))[0]


def broken(*_):
    raise RuntimeError("no compiler is there")


def test_compiled_training_does_not_resume_eagerly(tmp_path, monkeypatch):
    with opened(build("convolution")) as trainer:
        steps(trainer, 2)
        trainer.save(tmp_path)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    with (
        resumed(tmp_path, build("convolution")) as trainer,
        pytest.raises(ModelError, match="were compiled so far, but here .*no compiler is there"),
    ):
        steps(trainer, 1)


def test_eager_training_resumes_eagerly_where_it_could_be_compiled(tmp_path, monkeypatch):
    expected, _, _ = train(build("convolution"), [*digits_like().epoch(Cursor())], compile=False)
    with monkeypatch.context() as without, opened(build("convolution")) as trainer:
        without.setattr("torch._inductor.compile_fx.compile_fx", broken)
        steps(trainer, 2)
        assert "no compiler is there" in trainer.hybridized.why_not
        trainer.save(tmp_path)
    with resumed(tmp_path, build("convolution")) as trainer:
        steps(trainer, 3)
        assert trainer.hybridized.why_not == "they were before the checkpoint"
    assert trainer.fingerprint() == expected


@pytest.mark.slow
def test_no_update_runs_while_the_user_compiles_something_with_steps_in_flight():
    """Adam computes in another order while any thread compiles."""
    seen, begun, held = [], threading.Event(), threading.Event()

    def before_update(_):
        seen.append(torch.compiler.is_compiling())
        begun.set()

    def loss(output, y):
        if torch.is_grad_enabled() and held_step:
            wait(held)
        return nn.functional.cross_entropy(output, y)

    def backend(graph, inputs):
        held.set()
        begun.wait(1.0)  # as long as an update needs that does not wait for the end of compiling
        return graph.forward

    held_step = False
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))  # torch's compiler is there
    options = {"compile": False, "max_in_flight": 2, "before_update": before_update}
    with opened(build("convolution"), loss, **options) as trainer:
        first, second = make_batches((16, 16))
        trainer.step(*first)
        trainer.waitall()
        begun.clear()
        held_step = True
        trainer.step(*second)
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen == [False, False]


def test_a_failed_step_leaves_compiled_training_unchanged():
    bad = make_batches((16,))[0][0] * float("nan")
    (X, y), later = make_batches((16, 16))
    with opened(build("convolution"), max_in_flight=2) as trainer:
        trainer.step(X, y)
        trainer.step(bad, y)  # in flight: its error is raised later
        with pytest.raises(NonFiniteLossError):
            trainer.step(*later)
        assert trainer.steps_done == trainer.cursor.step == 1
        trainer.step(*later)
        found = trainer.fingerprint()
    assert found == train(build("convolution"), [(X, y), later], devices=1)[0]


COUNTS = {
    "length": lambda y: len(y),
    "tensor": lambda y: (y > 1).sum(),
    "item": lambda y: (y > 1).sum().item(),
    "int": lambda y: int((y > 1).sum()),
    "float": lambda y: 0.1 * len(y),
    "weights": lambda y: torch.linspace(0.1, 1, 5)[y].sum(),
}


@pytest.mark.parametrize("kind", [kind if kind == "tensor" else slow(kind) for kind in COUNTS])
def test_a_shards_count_is_its_own_and_not_that_of_the_shard_that_was_compiled(kind):
    def objective(model, X, y):
        scale = float(X.mean()) if kind == "float" else 1.0
        return scale * nn.functional.cross_entropy(model(X), y, reduction="sum"), COUNTS[kind](y)

    def losses(**options):
        options = {"separable": kind != "float", **options}  # X.mean() is the shard's own
        batches = make_batches((16, 16))
        return train(build("convolution"), batches, objective=objective, **options)

    one, two, eagerly = losses(devices=1), losses(devices=2), losses(compile=False)
    assert not one[2].why_not
    assert one[:2] == two[:2]
    assert one[1] == pytest.approx(eagerly[1], rel=1e-5)
