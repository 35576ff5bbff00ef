"""The test bed itself: a program with a mistake shows wrong numbers, its mended twin never does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import emu
from reference import assert_same_bits

SIZE = 256
DEVICES = ("emu:0", "emu:1")
CURRENT = torch.accelerator.current_stream


def stream_of(device):
    return CURRENT(torch.device(device).index)


def wait_for_a_copy(device, ok):
    """A copy on a side stream is used on the current one."""
    side, source = torch.Stream(device), torch.randn(SIZE).pin_memory()
    x = torch.zeros(SIZE, device=device)
    side.wait_stream(stream_of(device))
    with side:
        x.copy_(source, non_blocking=True)
    if ok:
        stream_of(device).wait_stream(side)
    return torch.equal((x * 2).cpu(), source * 2)


def wait_for_a_kernel(device, ok):
    """What a kernel gives is used on another stream."""
    side, a = torch.Stream(device), torch.randn(16, 16)
    x = a.to(device)
    y = x @ x
    if ok:
        event = torch.Event(device)
        event.record(stream_of(device))
        side.wait_event(event)
    with side:
        found = (y + 1).cpu()
    return torch.equal(found, a @ a + 1)


def overwrite_late(device, ok):
    """A tensor is written while another stream still reads it."""
    side, target = torch.Stream(device), torch.empty(SIZE).pin_memory()
    x = torch.ones(SIZE, device=device)
    side.wait_stream(stream_of(device))
    with side:
        target.copy_(x, non_blocking=True)
    if ok:
        stream_of(device).wait_stream(side)
    x.fill_(7)
    stream_of(device).synchronize()
    side.synchronize()
    return bool((target == 1).all())


def read_late(device, ok):
    """The host reads a copy before it was made."""
    x, target = torch.randn(SIZE), torch.zeros(SIZE).pin_memory()
    target.copy_(x.to(device) * 3, non_blocking=True)
    if ok:
        stream_of(device).synchronize()
    return torch.equal(target, x * 3)


def refill_pinned_memory(device, ok):
    """The host writes to pinned memory that is still to be copied."""
    buffer, copies = torch.empty(SIZE).pin_memory(), []
    for number in range(4):
        buffer.fill_(number)
        copies.append(buffer.to(device, non_blocking=True))
        if ok:
            stream_of(device).synchronize()
    return all(bool((one == number).all()) for number, one in enumerate(copies))


def record_stream(device, ok):
    """Memory is freed by its own stream while another one reads it."""
    home, side = stream_of(device), torch.Stream(device)
    total = torch.zeros(SIZE, device=device)
    for number in range(4):
        x = torch.full((SIZE,), number + 1.0, device=device)
        side.wait_stream(home)
        with side:
            total += x
        if ok:
            x.record_stream(side)
        del x
    home.wait_stream(side)
    return bool((total == 10).all())


def wait_across_devices(device, ok):
    """What one device has copied to the host is used by another one."""
    a, x = torch.zeros(SIZE).pin_memory(), torch.randn(SIZE, device=device)
    expected = (x * 5).cpu()
    a.copy_(x * 5, non_blocking=True)
    other = torch.Stream("emu:3")
    if ok:
        event = torch.Event(device)
        event.record(stream_of(device))
        other.wait_event(event)
    with other:
        return torch.equal(a.to("emu:3", non_blocking=True).cpu(), expected)


def wait_for_a_peer(device, ok):
    """A copy between two devices is used on another stream of the second."""
    a, side = torch.randn(SIZE), torch.Stream("emu:3")
    copied = (a.to(device) + 1).to("emu:3", non_blocking=True)
    if ok:
        event = torch.Event("emu:3")
        event.record(CURRENT(3))
        side.wait_event(event)
    with side:
        return torch.equal((copied * 2).cpu(), (a + 1) * 2)


def end_backward_elsewhere(device, ok):
    """A backward pass is ordered with the stream that has called it, and with no other."""
    side, weight = torch.Stream(device), torch.randn(8, 8)
    own, theirs = weight.to(device).requires_grad_(), weight.clone().requires_grad_()
    x = torch.randn(4, 8)

    def loss(weight, x):
        return torch.tanh(x @ weight).square().sum()

    side.wait_stream(stream_of(device))
    with side:
        total = loss(own, x.to(device))
        if not ok:
            total.backward()
    if ok:
        stream_of(device).wait_stream(side)
        total.backward()
    loss(theirs, x).backward()
    return torch.equal(own.grad.cpu(), theirs.grad)


def guard_the_current_device(device, ok):
    """A function waits for the current device, which need not be that of its argument."""

    def three_times(x):
        index = x.device.index if ok else torch.accelerator.current_device_index()
        with torch.get_device_module("emu").device(index):
            target.copy_(x * 3, non_blocking=True)
            torch.accelerator.synchronize()

    x, target = torch.randn(SIZE), torch.zeros(SIZE).pin_memory()
    with torch.get_device_module("emu").device(3):
        three_times(x.to(device))
    return torch.equal(target, x * 3)


PROGRAMS = (
    wait_for_a_copy,
    wait_for_a_kernel,
    overwrite_late,
    read_late,
    refill_pinned_memory,
    record_stream,
    wait_across_devices,
    wait_for_a_peer,
    end_backward_elsewhere,
    guard_the_current_device,
)


def right(program, mode, times, *, ok):
    count = 0
    for seed in range(times):
        emu.configure(mode, seed, delay_us=50)
        torch.manual_seed(seed)
        count += program(DEVICES[seed % 2], ok)
    return count


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_a_mistake_shows_nineteen_times_of_twenty_and_its_mended_twin_is_always_right(program):
    assert right(program, "lazy", 20, ok=False) <= 1
    assert right(program, "lazy", 200, ok=True) == 200


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["random", "thread"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_a_right_program_is_right_in_every_mode(program, mode):
    assert right(program, mode, 200, ok=True) == 200


def test_tensors_on_two_devices_don_t_mix():
    with pytest.raises(RuntimeError, match="xpected all tensors"):
        torch.ones(3, device="emu:0") + torch.ones(3, device="emu:1")


def test_an_event_belongs_to_its_device():
    event = torch.Event("emu:1")
    event.record(CURRENT(1))
    with pytest.raises(RuntimeError, match="device"):
        event.record(CURRENT(0))


def test_events_have_times():
    first, second = (torch.Event("emu:0", enable_timing=True) for _ in range(2))
    emu.slow_down(0, 2000)
    first.record(CURRENT(0))
    torch.ones(3, device="emu:0").add_(1)
    second.record(CURRENT(0))
    second.synchronize()
    assert first.elapsed_time(second) >= 2  # ms


# ---- numbers


class Network(nn.Module):
    """Convolutions, normalisation, dropout, attention."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.dropout(F.gelu(self.norm(self.convolution(x))), 0.2, self.training)
        return self.head(self.attention(F.max_pool2d(x, 4).flatten(2).mT).mean(1))


def train(device, optimizer, **options):
    torch.manual_seed(0)
    model, steps = Network().to(device), torch.randn(4, 6, 1, 8, 8)
    made = optimizer(model.parameters(), lr=0.05, **options)
    torch.manual_seed(5)
    for x in steps:
        made.zero_grad()
        F.cross_entropy(model(x.to(device)), torch.arange(6, device=device) % 4).backward()
        made.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize("foreach", [False, True])
def test_plain_torch_trains_with_the_bits_of_a_cpu(mode, foreach):
    emu.configure(mode)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        expected = train("cpu", optimizer, foreach=foreach)
        assert_same_bits(train("emu:1", optimizer, foreach=foreach), expected)


def test_generators_give_the_numbers_of_a_cpu():
    for draw in (torch.randn, torch.rand):
        here = draw(9, generator=torch.Generator("emu:1").manual_seed(3), device="emu:1")
        assert torch.equal(here.cpu(), draw(9, generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(4)
    here = torch.randn(9, device="emu:0")
    torch.manual_seed(4)
    assert torch.equal(here.cpu(), torch.randn(9))


# ---- faults and counters


def test_a_kernel_fails_when_it_runs_and_every_later_call_on_its_device():
    emu.fail_after(0, 1)
    x = torch.ones(3, device="emu:0")
    x += 1
    for call in (x.sum().item, x.cpu, lambda: x + 1, lambda: torch.ones(3, device="emu:0")):
        with pytest.raises(torch.AcceleratorError, match="a fault on request"):
            call()
    assert torch.ones(3, device="emu:1").sum().item() == 3


def test_a_device_disappears_with_its_memory_and_every_call_fails():
    def ready(device):
        event = torch.Event(f"emu:{device}")
        event.record(CURRENT(device))
        return event

    given, here = torch.ones(3, device="emu:1"), torch.zeros(3, device="emu:0")
    stream, event, used = torch.Stream("emu:1"), ready(1), torch.ones(3).pin_memory()
    given.add_(1)
    here.copy_(used.to("emu:1", non_blocking=True))  # none of it has run
    del used
    emu.disappear(1)
    for call in (
        given.cpu,
        event.query,
        lambda: given + 1,
        lambda: given[0],
        lambda: given.record_stream(stream),
        lambda: given.to("emu:0"),
        lambda: given.copy_(here),
        lambda: torch.empty(3, device="emu:1"),
        lambda: torch.Stream("emu:1"),
        lambda: event.record(stream),
        lambda: CURRENT(0).wait_event(event),
        lambda: torch.accelerator.synchronize(1),
        lambda: torch.accelerator.get_memory_info(1),
        lambda: torch.ones(3).pin_memory(),  # once, for the block that the device had used
    ):
        with pytest.raises(torch.AcceleratorError, match="off the bus"):
            call()
    assert torch.ones(3).pin_memory().is_pinned()
    assert here.sum().item() != 3  # what was on its way is lost
    given = None  # which frees it
    assert torch.ones(3, device="emu:0").sum().item() == 3


def test_a_bad_label_is_a_device_side_assert():
    loss = F.cross_entropy(torch.ones(2, 3, device="emu:0"), torch.tensor([0, 7]).to("emu:0"))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        loss.item()


def test_a_device_stands_still_and_goes_on():
    emu.stand_still(1)
    x = torch.ones(3, device="emu:1") * 2
    event = torch.Event("emu:1")
    event.record(CURRENT(1))
    assert not event.query()
    assert torch.ones(3, device="emu:0").sum().item() == 3
    emu.stand_still(1, still=False)
    assert x.sum().item() == 6


def test_memory_has_a_limit():
    emu.limit_memory(0, 1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1 << 20, device="emu:0")
    assert torch.ones(1 << 10, device="emu:0").sum().item() == 1 << 10


def test_waits_of_the_host_are_counted_with_their_lines():
    emu.host_waits()
    with emu.noting_places() as places:
        x = torch.ones(3, device="emu:0").add_(1)
        assert not emu.host_waits()
        x.sum().item()
        torch.accelerator.synchronize(0)
    assert sum(emu.host_waits().values()) == 2
    assert len(places) == 2
    assert all("test_emulator.py" in place for place in places)
