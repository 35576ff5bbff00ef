"""What users do besides ordinary steps, on emulated accelerators, against plain torch on a CPU."""

import copy
import functools

import pytest
import torch
from torch import nn

import emu
import evenstep
from evenstep.inference import fast_call
from reference import assert_same_bits, plain_outputs, reference_backward, whole_state
from slicing import sliced_model
from zoo import build, make_batches

LAYOUTS = {
    "1": ["emu:0"],
    "2": ["emu:1", "emu:0"],
    "twice, with a CPU": ["emu:2", "emu:2", "cpu:0"],
    "behind a CPU": ["cpu:0", "emu:0", "emu:1"],
}
EVERY_LAYOUT = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)
SIZES = (33, 16, 30, 24)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


STAGES = {"layout": evenstep.Layout(divide=evenstep.Stages("balanced"))}
WITH_STAGES = pytest.mark.parametrize(
    ("devices", "layout"),
    [*((devices, {}) for devices in LAYOUTS.values()), (["emu:0", "emu:1"], STAGES)],
    ids=[*LAYOUTS, "stages"],
)


def open_trainer(model, optimizer, devices, **options):
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices, **options)


@WITH_STAGES
@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_gradients_of_two_batches_are_accumulated_and_clipped_by_the_user(mode, devices, layout):
    emu.configure(mode, seed=1)
    model = build("batch_norm")
    expected = copy.deepcopy(model)
    optimizer, plain = momentum(model), momentum(expected)
    batches = make_batches((24, 24, 32, 32))
    with open_trainer(model, optimizer, devices, **layout) as trainer:
        for first, second in (batches[:2], batches[2:]):
            trainer.backward(*first)
            trainer.backward(*second, accumulate=True)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    for number, (first, second) in enumerate((batches[:2], batches[2:])):
        reference_backward(expected, *first, shards=8, step=2 * number)
        summed = [parameter.grad for parameter in expected.parameters()]
        reference_backward(expected, *second, shards=8, step=2 * number + 1)
        for parameter, gradient in zip(expected.parameters(), summed, strict=True):
            parameter.grad = gradient + parameter.grad
        plain_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        plain.step()
    assert norm.cpu() == plain_norm
    assert_same_bits(emu.on_the_host(whole_state(model, optimizer)), whole_state(expected, plain))


@WITH_STAGES
def test_outputs_and_metrics_are_those_of_the_plain_model(devices, layout):
    model = build("batch_norm")
    optimizer = momentum(model)
    batches = make_batches((24, 17))
    with open_trainer(model, optimizer, devices, **layout) as trainer:
        for batch in make_batches(SIZES):
            trainer.step(*batch)
        outputs = trainer.predict([batch[:1] for batch in batches])
        accuracy = trainer.evaluate(batches, {"accuracy": evenstep.metrics.accuracy})["accuracy"]
    plain = copy.deepcopy(model).cpu()
    expected = torch.cat([plain_outputs(plain, X) for X, _ in batches])
    hits = sum(int((plain_outputs(plain, X).argmax(1) == y).sum()) for X, y in batches)
    assert torch.allclose(outputs.cpu(), expected, atol=1e-6)  # other batch sizes, other products
    assert accuracy == hits / 41


@EVERY_LAYOUT
@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_average_of_the_weights_follows_the_updates(in_flight, devices):
    def averaged(devices):
        model = build("dropout")
        optimizer = momentum(model)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        average.to(devices[0] if devices[0].startswith("emu") else "cpu")
        with open_trainer(
            model,
            optimizer,
            devices,
            max_in_flight=in_flight,
            after_update=average.update_parameters,
        ) as trainer:
            for batch in make_batches(SIZES):
                trainer.step(*batch)
        return emu.on_the_host({**whole_state(model, optimizer), **average.state_dict()})

    assert_same_bits(averaged(devices), averaged(["cpu:0"]))


@EVERY_LAYOUT
@pytest.mark.parametrize("in_flight", [1, 3])
def test_recomputed_activations_draw_the_same_numbers_again(in_flight, devices):
    def train(devices):
        model = build("dropout")
        optimizer = momentum(model)

        def objective(model, X, y):
            output = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False)
            return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)

        with evenstep.Trainer(
            model, optimizer, objective=objective, devices=devices, max_in_flight=in_flight
        ) as trainer:
            for batch in make_batches(SIZES):
                trainer.step(*batch)
        return emu.on_the_host(whole_state(model, optimizer))

    assert_same_bits(train(devices), train(["cpu:0"]))


class TwoTowers(nn.Module):
    """Two encoders, whose outputs are compared with those of the whole batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8))
        self.other = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.2))


def contrastive(model, images, rows):
    one, other = model.one(images), model.other(images.flip(2))
    logits = one @ evenstep.all_gather(other).T
    return nn.functional.cross_entropy(logits, rows, reduction="sum"), len(rows)


@EVERY_LAYOUT
@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize("batch_norm", ["shard", "sync"])
def test_shards_side_by_side_exchange_values_between_devices(batch_norm, mode, devices):
    def train(devices):
        model = TwoTowers()
        optimizer = momentum(model)
        with evenstep.Trainer(
            model,
            optimizer,
            objective=contrastive,
            devices=devices,
            experiment=evenstep.Experiment(shards=5, batch_norm=batch_norm),
            layout=evenstep.Layout(side_by_side=True),
        ) as trainer:
            losses = [
                float(trainer.step(images, torch.arange(len(images))))
                for images, _ in make_batches(SIZES)
            ]
            measured = trainer.evaluate(
                [(images, torch.arange(len(images))) for images, _ in make_batches((16,))],
                {"loss": contrastive},
            )
        return emu.on_the_host(whole_state(model, optimizer)), losses, measured

    expected = train(["cpu:0"])
    emu.configure(mode, seed=5, delay_us=20)
    state, *numbers = train(devices)
    assert_same_bits(state, expected[0])
    assert numbers == [*expected[1:]]


@pytest.mark.parametrize(
    "mode",
    ["lazy", "thread", *(pytest.param(m, marks=pytest.mark.slow) for m in ("random", "eager"))],
)
@pytest.mark.parametrize(
    "devices",
    [["emu:0", "emu:1"], ["emu:2", "emu:2"], ["emu:0", "cpu:0", "emu:1"], ["cpu:0", "emu:3"]],
    ids=str,
)
@pytest.mark.thinned(3)
def test_slices_of_layers_are_computed_by_several_devices(devices, mode):
    def train(devices, layout):
        model = sliced_model()
        optimizer = momentum(model)
        with open_trainer(model, optimizer, devices, layout=layout) as trainer:
            losses = [float(trainer.step(*batch)) for batch in make_batches(SIZES)]
            outputs = trainer.predict([make_batches((16,))[0][:1]])
        return emu.on_the_host({**whole_state(model, optimizer), "outputs": outputs}), losses

    expected, expected_losses = train(["cpu:0"], evenstep.Layout())
    emu.configure(mode, seed=7, delay_us=20)
    state, losses = train(devices, evenstep.Layout(divide=evenstep.Slices()))
    assert_same_bits(state, expected)
    assert losses == expected_losses


def with_a_stream_of_its_own(model, images, classes):
    """A loss that reads a number of it, with a term that is computed on a stream of its own."""
    if images.device.type == "cpu":
        brightness = (images * 2).sum()
    else:
        here, side = torch.accelerator.current_stream(images.device), torch.Stream(images.device)
        side.wait_stream(here)
        with side:
            images.record_stream(side)
            brightness = (images * 2).sum()
        here.wait_stream(side)
        brightness.record_stream(here)
    loss = nn.functional.cross_entropy(model(images), classes, reduction="sum")
    assert loss.item() >= 0
    return loss + 1e-3 * brightness * next(model.parameters()).sum(), len(classes)


@EVERY_LAYOUT
@pytest.mark.parametrize("mode", ["lazy", "thread"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.thinned(2)
def test_the_user_s_own_streams_in_the_loss_and_in_the_loader(in_flight, mode, devices):
    """Examples are copied without blocking, on a stream of the loader's, and changed there."""

    def train(devices):
        model = build("convolution")
        optimizer = momentum(model)
        name = next((device for device in devices if device.startswith("emu")), None)
        loader = None if name is None else torch.Stream(name)
        with evenstep.Trainer(
            model,
            optimizer,
            objective=with_a_stream_of_its_own,
            devices=devices,
            max_in_flight=in_flight,
        ) as trainer:
            for images, classes in make_batches(SIZES):
                if loader is not None:
                    given = images.pin_memory()
                    with loader:
                        images = given.to(name, non_blocking=True)
                    here = torch.accelerator.current_stream(images.device)
                    here.wait_stream(loader)
                    images.record_stream(here)
                trainer.step(images * 2, classes)
        return emu.on_the_host(whole_state(model, optimizer))

    expected = train(["cpu:0"])
    emu.configure(mode, seed=3)
    assert_same_bits(train(devices), expected)


class AskedToFailError(Exception):
    """Raised by a hook of the user's."""


@EVERY_LAYOUT
@pytest.mark.parametrize("mode", ["lazy", "thread"])
@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("fails_in", ["before_update", "after_update"])
@pytest.mark.thinned(4)
def test_evaluations_between_steps_in_flight_and_hooks_that_fail_while_kernels_run(
    fails_in, in_flight, mode, devices
):
    """Examples are on their way, on a stream of a device that the trainer does not have."""

    def train(devices):
        model, fails, measured = build("batch_norm"), [], []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def hook(model):
            if fails:
                raise AskedToFailError(fails.pop())

        def batches(sizes):
            for X, y in make_batches(sizes):
                if devices == ["cpu:0"]:
                    yield X * 2, y
                    continue
                with torch.Stream("emu:3"):
                    X, y = X.pin_memory(), y.pin_memory()
                    X, y = (one.to("emu:3", non_blocking=True) for one in (X, y))
                    yield X * 2, y

        with open_trainer(
            model, optimizer, devices, max_in_flight=in_flight, **{fails_in: hook}
        ) as trainer:
            for number, (X, y) in enumerate(batches((24, 16, 32, 24, 16, 24))):
                if number == 3:
                    trainer.waitall()
                    fails.append("as asked for")
                    with pytest.raises(AskedToFailError):
                        float(trainer.step(X, y))
                if number != 3 or fails_in == "before_update":
                    trainer.step(X, y)
                if number % 2:
                    measured.append(
                        trainer.evaluate(batches((16, 9)), {"hits": evenstep.metrics.accuracy})
                    )
                    outputs = trainer.predict((images,) for images, _ in batches((17,)))
                    measured.append(outputs.tolist())
        return emu.on_the_host(whole_state(model, optimizer)), measured

    expected, expected_measures = train(["cpu:0"])
    emu.configure(mode, seed=4, delay_us=20)
    state, measured = train(devices)
    assert_same_bits(state, expected)
    assert measured == expected_measures


@EVERY_LAYOUT
def test_the_gradient_of_a_batch_tensor_s_own_graph(devices):
    """A penalty's gradient that the user has put into `.grad` is added, as plain torch adds it."""
    model = build("convolution")
    expected = copy.deepcopy(model)
    optimizer, plain = momentum(model), momentum(expected)
    with open_trainer(model, optimizer, devices) as trainer:
        for batch in make_batches((24, 24)):
            trainer.waitall()
            optimizer.zero_grad()
            (1e-3 * sum(one.square().sum() for one in model.parameters())).backward()
            trainer.step(*batch)
    for step, batch in enumerate(make_batches((24, 24))):
        plain.zero_grad()
        (1e-3 * sum(one.square().sum() for one in expected.parameters())).backward()
        own = [one.grad for one in expected.parameters()]
        reference_backward(expected, *batch, shards=8, step=step)
        for parameter, gradient in zip(expected.parameters(), own, strict=True):
            parameter.grad = parameter.grad + gradient
        plain.step()
    assert_same_bits(emu.on_the_host(whole_state(model, optimizer)), whole_state(expected, plain))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_verify_finds_the_same_bits(in_flight):
    def make_trainer(devices):
        model = build("dropout")
        return open_trainer(model, momentum(model), devices, max_in_flight=in_flight)

    layouts = [["cpu:0"], ["emu:0"], ["emu:1", "emu:0"], ["cpu:0", "emu:3"]]
    verdict = evenstep.verify(make_trainer, make_batches(SIZES), devices=layouts, steps=4)
    assert verdict.identical, verdict


def test_a_model_on_an_accelerator_is_exported(tmp_path):
    model = build("convolution")
    (X, _), *_ = make_batches((6,))
    optimizer = momentum(model)
    with open_trainer(model, optimizer, ["emu:0", "emu:1"]) as trainer:
        for batch in make_batches(SIZES):
            trainer.step(*batch)
    evenstep.export(model, X.to("emu:0"), tmp_path / "model.pt2")
    loaded = evenstep.load_exported(tmp_path / "model.pt2")
    assert torch.equal(loaded(X.to("emu:0")).cpu(), plain_outputs(model, X.to("emu:0")).cpu())


@pytest.mark.slow  # onnx is imported
def test_a_model_on_an_accelerator_is_written_as_onnx(tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install evenstep[onnx]")
    model = build("convolution").to("emu:1")
    (X, _), *_ = make_batches((6,))
    file = evenstep.export(model, X.to("emu:1"), tmp_path / "model.onnx")
    assert file.stat().st_size


def test_the_time_of_a_call_is_that_of_its_kernels(monkeypatch):
    monkeypatch.setattr(fast_call, "_MAKERS", {})
    monkeypatch.setattr(fast_call, "_ROUND_S", 0.0)  # one call
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("emu:0")
    delay_us, least_kernels = 2000, 3
    emu.configure("thread")
    emu.slow_down(0, delay_us)
    called = evenstep.hybridize(model, torch.ones(2, 4, device="emu:0"))
    assert called.method.call_us > delay_us * least_kernels


@pytest.mark.parametrize("mode", emu.MODES)
def test_a_training_that_is_saved_in_the_background_saves_what_it_had(tmp_path, mode):
    emu.configure(mode, seed=2)
    train = functools.partial(_train_and_save, tmp_path)
    expected = train("cpu", ["cpu:0"])
    assert_same_bits(train(mode, ["emu:0", "emu:1"]), expected)


def _train_and_save(folder, name, devices):
    """Train four steps, saving after two of them; return the state after the two, from the file."""
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with open_trainer(model, optimizer, devices) as trainer:
        for number, batch in enumerate(make_batches(SIZES)):
            trainer.step(*batch)
            if number == 1:
                trainer.save(folder / name, background=True)
    model = build("batch_norm", seed=5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loaded = evenstep.Trainer.load(
        folder / name, model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0"
    )
    with loaded:
        return whole_state(model, optimizer)
