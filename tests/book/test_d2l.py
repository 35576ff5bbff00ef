"""`evenstep.d2l`: the book's names, and its cells with the import line changed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep.book.d2l
from evenstep import d2l
from evenstep.data import fashion_mnist
from evenstep.devices import Device
from evenstep.errors import InputError

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
OWN = [Device("cpu", number, own_memory=True) for number in range(3)]
CELLS = ("000_6bf31d1f95fc564a.txt", "004_0d4e99838422b27d.txt")
CELL = re.compile(r"^```.*\n#@tab (?:pytorch|pytorch, paddle)\n((?:.*\n)*?)```", re.MULTILINE)

# The book's training function in words of our own, for where its pages are not at hand.
OURS = """
from d2l import torch as d2l
import torch
from torch import nn

def train(net, num_gpus, batch_size, lr):
    batches, held_out = d2l.load_data_fashion_mnist(batch_size)
    devices = [d2l.try_gpu(i) for i in range(num_gpus)]
    net = nn.DataParallel(net, device_ids=devices)
    optimizer = torch.optim.SGD(net.parameters(), lr)
    loss = nn.CrossEntropyLoss()
    timer, num_epochs = d2l.Timer(), 10
    animator = d2l.Animator('epoch', 'test acc', xlim=[1, num_epochs])
    for epoch in range(num_epochs):
        timer.start()
        for X, y in batches:
            optimizer.zero_grad()
            X, y = X.to(devices[0]), y.to(devices[0])
            loss(net(X), y).backward()
            optimizer.step()
        timer.stop()
        animator.add(epoch + 1, (d2l.evaluate_accuracy_gpu(net, held_out),))
    print(f'test acc: {animator.Y[0][-1]:.2f}, {timer.avg():.1f} sec/epoch on {str(devices)}')

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
train(net, num_gpus=1, batch_size=256, lr=0.1)
train(net, num_gpus=2, batch_size=512, lr=0.2)
"""


def run_cells(source, monkeypatch, tmp_path, examples):
    """Run cells of the book, one epoch of few examples; return what they define."""
    small = {
        train: torch.utils.data.TensorDataset(
            torch.rand(examples, 1, 28, 28), torch.arange(examples) % 10
        )
        for train in (True, False)
    }
    monkeypatch.setattr(evenstep.book.d2l, "fashion_mnist", lambda train, root: small[train])
    monkeypatch.chdir(tmp_path)
    source = source.replace("from d2l import torch as d2l", "from evenstep import d2l")
    source, short = re.subn(r"(d2l\.Timer\(\)), 10", r"\1, 1", source)
    assert short == 1
    names = {}
    exec(source, names)
    return names


def test_a_training_function_as_the_book_writes_it(monkeypatch, tmp_path, capsys):
    run_cells(OURS, monkeypatch, tmp_path, 64)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"test acc: \d\.\d\d, \d+\.\d sec/epoch on \[.*cpu.*0.*\]", first)
    assert "index=1" in second
    assert (tmp_path / "animator.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", CELLS)
def test_the_books_own_cells_run_with_another_import_line(page, monkeypatch, tmp_path, capsys):
    file = SEEDS / page
    if not file.is_file():
        pytest.skip("the book's pages are not beside this checkout (../shared/seeds)")
    source = "\n".join(CELL.findall(file.read_text(encoding="utf-8")))
    names = run_cells(source, monkeypatch, tmp_path, 24)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert isinstance(names["net"][3][0], d2l.Residual)


@pytest.mark.parametrize("channels", [(8, 16), (16,)])
def test_a_residual_block_in_the_spelling_of_both_editions(channels):
    block = d2l.Residual(*channels, use_1x1conv=True, strides=2)
    assert block(torch.rand(2, 8, 6, 6)).shape == (2, 16, 3, 3)
    same = d2l.Residual(*(8, 8)[: len(channels)])
    assert same(torch.rand(2, 8, 6, 6)).shape == (2, 8, 6, 6)
    assert {name for name, _ in block.named_children()} == {"conv1", "conv2", "conv3", "bn1", "bn2"}


def test_a_timer_keeps_each_run():
    timer = d2l.Timer()
    timer.stop()
    timer.start()
    timer.stop()
    assert len(timer.times) == 2
    assert timer.sum() == timer.cumsum()[-1] == 2 * timer.avg()
    assert timer.cumsum()[0] == timer.times[0]


def test_a_benchmark_says_its_seconds(capsys):
    with d2l.Benchmark("Counting"):
        pass
    assert re.fullmatch(r"Counting: 0\.\d{4} sec\n", capsys.readouterr().out)


def test_an_accumulator_sums_side_by_side():
    sums = d2l.Accumulator(2)
    sums.add(1, torch.tensor(2.5))
    sums.add(3, 0.5)
    assert (sums[0], sums[1]) == (4.0, 3.0)
    sums.add(1)  # the book's takes fewer numbers
    assert sums.data == [5.0, 3.0]
    with pytest.raises(ValueError, match="got 3 numbers to add to 2 sums"):
        sums.add(1, 2, 3)
    sums.reset()
    assert sums.data == [0.0, 0.0]


def test_an_animator_keeps_points_and_leaves_out_none(tmp_path):
    animator = d2l.Animator("epoch", legend=["loss", "acc"], file=tmp_path / "curves.png")
    animator.add(1, (0.5, None))
    animator.add(2, (0.25, 0.75))
    assert animator.X == [[1.0, 2.0], [2.0]]
    assert animator.Y == [[0.5, 0.25], [0.75]]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("xs", "has_halves"), [((1, 2, 3, 4), False), ((1, 1.5, 4), True)])
def test_an_animator_has_ticks_between_epochs_only_if_it_has_points_there(tmp_path, xs, has_halves):
    animator = d2l.Animator("epoch", ylim=[0, 1], file=tmp_path / "curves.svg")
    for x in xs:
        animator.add(x, 0)
    drawn = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "<!-- 3 -->" in drawn or has_halves
    assert ("<!-- 1.5 -->" in drawn) == has_halves


def test_an_animator_shows_a_picture_in_a_notebook_that_has_used_no_magic(monkeypatch):
    from IPython import display

    from evenstep.book import animator as module

    shown = []
    monkeypatch.setattr(module, "_in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", shown.append)
    d2l.Animator("epoch").add(1, 0.5)
    assert shown[0].data.startswith(b"\x89PNG")


def test_an_animator_writes_through_no_link(tmp_path):
    (tmp_path / "other.png").write_bytes(b"keep")
    (tmp_path / "curves.png").symlink_to("other.png")
    with pytest.raises(InputError, match="it is a symbolic link"):
        d2l.Animator("epoch", file=tmp_path / "curves.png").add(1, 0.5)
    assert (tmp_path / "other.png").read_bytes() == b"keep"


def test_accuracy_counts_right_predictions_of_scores_and_of_labels():
    y = torch.tensor([1, 0, 1])
    assert d2l.accuracy(torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]]), y) == 2.0
    assert d2l.accuracy(torch.tensor([1, 1, 0]), y) == 1.0


def test_sgd_divides_by_the_whole_batch_and_clears():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    w.grad = torch.tensor([4.0, 8.0])
    d2l.sgd([w], 0.5, 4)
    assert w.tolist() == [0.5, 1.0]
    assert w.grad.tolist() == [0.0, 0.0]


def test_devices_without_gpus_are_cpu_devices(monkeypatch):
    monkeypatch.setattr(evenstep.book.d2l, "gpu_count", lambda: 0)
    assert [d2l.try_gpu(i).name for i in range(3)] == ["cpu:0", "cpu:1", "cpu:2"]
    for module in (evenstep.book.d2l, evenstep.devices.discovery):
        monkeypatch.setattr(module, "gpu_count", lambda: 2)
    assert [d2l.try_gpu(i).name for i in range(3)] == ["cuda:0", "cuda:1", "cpu:0"]


def test_tensors_and_modules_go_to_a_device_of_ours():
    X = torch.ones(2)
    assert X.to(OWN[0]).device.type == "cpu"
    copied = X.to(OWN[0], copy=True)
    assert copied.data_ptr() != X.data_ptr()
    assert nn.Linear(1, 1).to(OWN[1]).weight.device.type == "cpu"


def test_a_batch_is_split_over_devices_even_if_unevenly():
    batch = torch.arange(24).reshape(6, 4)
    first, second = d2l.split_and_load(batch, OWN[:2])
    assert first.equal(batch[:3])
    assert second.equal(batch[3:])
    X, y = d2l.split_batch(batch, torch.arange(6), [*OWN, Device("cpu", 3)])
    assert [len(part) for part in X] == [len(part) for part in y] == [2, 2, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_allreduce_gives_the_sum_to_every_device(count):
    data = [torch.ones(1, 2) * (number + 1) for number in range(count)]
    d2l.allreduce(data)
    total = count * (count + 1) / 2
    assert all(tensor.equal(torch.full((1, 2), total)) for tensor in data)
    assert len({tensor.data_ptr() for tensor in data}) == count


def lenet_params():
    torch.manual_seed(0)
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    return [torch.randn(shape) * 0.05 for shape in shapes]


def test_params_are_copies_that_have_gradients():
    params = lenet_params()
    mine = d2l.get_params(params, OWN[0])
    assert all(p.requires_grad and p.is_leaf for p in mine)
    with torch.no_grad():
        mine[0].zero_()
    assert params[0].any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_batch_on_several_devices_updates_as_the_whole_batch_does(count):
    X, y = torch.rand(12, 1, 28, 28), torch.arange(12) % 10
    (whole,) = [d2l.get_params(lenet_params(), OWN[0])]
    F.cross_entropy(d2l.lenet(X, whole), y).backward()
    expected = [p.detach() - 0.2 * p.grad for p in whole]
    device_params = [d2l.get_params(lenet_params(), device) for device in OWN[:count]]
    d2l.train_batch(X, y, device_params, OWN[:count], 0.2)
    for params in device_params:
        torch.testing.assert_close([p.detach() for p in params], expected)
        assert all(map(torch.equal, params, device_params[0]))


class Pairs(nn.Module):
    """Takes a list, as the book's BERT does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, inputs):
        words, lengths = inputs
        return self.linear(words / lengths)


@pytest.mark.parametrize("device", [None, *OWN[:1]])
def test_accuracy_of_a_net_that_takes_a_list_of_inputs(device):
    torch.manual_seed(0)
    net = Pairs()
    batches = [([torch.randn(7, 3), torch.ones(7, 1)], torch.arange(7) % 4) for _ in range(2)]
    right = sum(int((net(X).argmax(1) == y).sum()) for X, y in batches)
    assert d2l.evaluate_accuracy_gpu(net, batches, device) == right / 14


def test_accuracy_is_the_same_over_all_ways_of_evaluating():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))
    batches = [(torch.rand(7, 1, 28, 28), torch.arange(7) % 3) for _ in range(3)]
    expected = d2l.evaluate_accuracy(lambda X: net[2](net[0](X)), batches)
    assert d2l.evaluate_accuracy(net, batches) == expected
    assert d2l.evaluate_accuracy_gpu(net, batches, OWN[0]) == expected
    assert d2l.evaluate_accuracy_gpus(net, batches, OWN[:2]) == expected
    assert net.training


def test_fashion_mnist_comes_in_batches_each_epoch_in_another_order(fashion_mnist_dir):
    batches, held_out = d2l.load_data_fashion_mnist(512, root=str(fashion_mnist_dir))
    assert (len(batches), len(held_out)) == (118, 20)
    (X, y), (again, _) = next(iter(batches)), next(iter(batches))
    assert X.shape == (512, 1, 28, 28)
    assert y.dtype == torch.int64
    assert not X.equal(again)
    images = fashion_mnist(False, str(fashion_mnist_dir)).tensors[0]
    assert next(iter(held_out))[0].equal(images[:512])


def test_images_can_be_resized(monkeypatch):
    dataset = torch.utils.data.TensorDataset(torch.rand(3, 1, 28, 28), torch.zeros(3).long())
    monkeypatch.setattr(evenstep.book.d2l, "fashion_mnist", lambda train, root: dataset)
    batches, _ = d2l.load_data_fashion_mnist(2, resize=64)
    assert next(iter(batches))[0].shape == (2, 1, 64, 64)


def test_data_parallel_without_a_gpu_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr("evenstep.book.d2l._SAID", [])
    net = nn.DataParallel(nn.Linear(4, 3))
    batches = [(torch.randn(6, 4), torch.arange(6) % 3)]
    for one in (net.module, net, net):
        d2l.evaluate_accuracy_gpu(one, batches)
    if not torch.cuda.is_available():
        (said,) = [one for one in caplog.messages if "DataParallel" in one]
        assert "one device computes all of it" in said
        assert "evenstep.Trainer(net, trainer, loss, devices=devices)" in said
