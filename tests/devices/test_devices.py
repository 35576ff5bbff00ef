"""Devices as values: names, discovery, quotas of control groups, and notes about a layout."""

import dataclasses
import os

import pytest
import torch

import evenstep
from evenstep.devices import (
    Device,
    accelerator,
    as_device,
    cgroup_quota_cores,
    deterministic_kernels,
    discovery,
    find_devices,
    free_memory_nbytes,
    gpu_count,
    intra_op_threads,
    layout_notes,
    parse_device,
    try_all_gpus,
    try_gpu,
    usable_cores,
)
from evenstep.errors import DeviceError


@pytest.fixture
def cores(monkeypatch):
    """Return a function that lets this process use so many cores."""

    def allow(count):
        monkeypatch.setattr(discovery, "usable_cores", lambda: count)

    return allow


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that puts GPUs of these models into the machine."""

    def plug_in(*models):
        kind = torch.device("cuda") if models else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: torch.cuda.is_available())
        monkeypatch.setattr(accelerator, "refuse_incomplete", lambda kind, devices: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(models))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(models))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: models[index])

    plug_in()
    return plug_in


def trainer_on(devices):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evenstep.Trainer(model, optimizer, torch.nn.MSELoss(), devices=devices)


def names(found):
    return [device.name for device in found]


# ---- a device as a value


@pytest.mark.parametrize(
    ("text", "device", "name", "memory"),
    [
        ("cpu", Device("cpu", 0), "cpu:0", "cpu"),
        ("cpu:0", Device("cpu", 0), "cpu:0", "cpu"),
        (" cpu:12 ", Device("cpu", 12), "cpu:12", "cpu"),
        ("cpu:own", Device("cpu", 0, own_memory=True), "cpu:0:own", "cpu:0:own"),
        ("cpu:2:own", Device("cpu", 2, own_memory=True), "cpu:2:own", "cpu:2:own"),
        ("cuda", Device("cuda", 0), "cuda:0", "cuda:0"),
        ("cuda:3", Device("cuda", 3), "cuda:3", "cuda:3"),
    ],
)
def test_a_name_is_read_and_written(text, device, name, memory):
    assert parse_device(text) == device
    assert (device.name, str(device), device.memory) == (name, name, memory)
    assert parse_device(name) == device


def test_a_device_checks_its_numbers_and_is_frozen():
    assert parse_device("cpu:1", threads=3) == Device("cpu", 1, threads=3)
    for wrong, most in (
        *(({"index": 0, "threads": number}, "1 to 1024") for number in (0, -4, 1025)),
        ({"index": -1}, "0 to 999999"),
    ):
        name, value = [*wrong.items()][-1]
        with pytest.raises(DeviceError, match=f"got {name}={value} of a device: .* from {most}"):
            Device("cpu", **wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Device("cpu", 0).index = 1


takes_devices = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="torch 2.9 is the first that asks what a device is"
)


@takes_devices
@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.ones(3).to(device),
        lambda device: torch.ones(3).to(device=device),
        lambda device: torch.ones(3).to(device, dtype=torch.float32),
        lambda device: torch.ones(3).new_ones(3, device=device),
        lambda device: torch.ones(3, device=device),
        lambda device: torch.ones_like(torch.zeros(3), device=device),
        lambda device: torch.tensor([1.0, 1.0, 1.0], device=device),
        lambda device: torch.as_tensor([1.0, 1.0, 1.0], device=device),
        lambda device: torch.nn.BatchNorm1d(3, device=device).weight,
        lambda device: torch.nn.BatchNorm1d(3).to(device=device).weight,
        lambda device: torch.nn.utils.rnn.pack_sequence([torch.ones(3)]).to(device=device).data,
    ],
)
def test_torch_takes_a_device_wherever_it_takes_its_own(make):
    made = make(Device("cpu", 1))
    assert made.device == torch.device("cpu")
    assert torch.equal(made, torch.ones(3))


@takes_devices
def test_random_numbers_on_a_device_are_torchs(gpus):
    torch.manual_seed(3)
    expected = torch.randn(2, 3)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(size=(2, 3), device=try_gpu()), expected)


def test_a_device_in_a_tensors_place_is_a_type_error():
    with pytest.raises(TypeError):
        torch.stack([torch.ones(3), Device("cpu", 1)])


def test_a_device_in_torchs_words(gpus):
    gpus("H200", "L4")
    assert Device("cpu", 3).torch_device == torch.device("cpu")
    assert Device("cpu", 3, own_memory=True).torch_device == torch.device("cpu")
    assert Device("cuda", 1).torch_device == torch.device("cuda:1")
    assert Device("cpu", 3).model_name == "cpu"
    assert Device("cuda", 1).model_name == "L4"


# ---- what find_devices accepts


def test_auto_without_gpus_is_a_device_for_each_core(gpus, cores):
    cores(3)
    assert find_devices() == find_devices("auto") == tuple(Device("cpu", i) for i in range(3))
    assert find_devices("auto", threads=3) == (Device("cpu", 0, threads=3),)
    cores(5)
    assert find_devices("auto", threads=2) == (
        Device("cpu", 0, threads=2),
        Device("cpu", 1, threads=2),
    )
    assert find_devices("auto", threads=16) == (Device("cpu", 0, threads=16),)


def test_auto_with_gpus_is_all_of_them(gpus):
    gpus("A", "A", "A")
    assert find_devices("auto") == tuple(Device("cuda", i) for i in range(3))
    assert try_all_gpus(threads=4) == tuple(Device("cuda", i, threads=4) for i in range(3))


def test_gpus_are_those_that_torch_can_use(gpus, monkeypatch):
    assert try_gpu() == Device("cpu", 0)
    gpus("A", "A")
    assert [try_gpu(*index) for index in ((), (1,), (2,))] == [
        *(Device("cuda", 0), Device("cuda", 1), Device("cpu", 0))
    ]
    assert gpu_count() == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_count() == 0


def test_a_number_is_that_many(gpus):
    assert find_devices(4) == find_devices("4") == find_devices(" 4 ")
    assert names(find_devices(4)) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert {device.threads for device in find_devices(2, threads=3)} == {3}
    gpus("A", "A")
    assert names(find_devices(2)) == ["cuda:0", "cuda:1"]


def test_lists_of_names_devices_and_torchs_devices(gpus):
    gpus("A", "A")
    own = Device("cpu", 3, own_memory=True, threads=2)
    wanted = ["cpu:1", own, torch.device("cuda", 1), torch.device("cpu")]
    assert names(find_devices(wanted)) == ["cpu:1", "cpu:3:own", "cuda:1", "cpu:0"]
    assert [device.threads for device in find_devices(wanted, threads=4)] == [4, 2, 4, 4]
    assert names(find_devices("cpu:1, cpu:0:own ,cuda:0")) == ["cpu:1", "cpu:0:own", "cuda:0"]
    assert names(find_devices("cpu:7")) == ["cpu:7"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (torch.device("cpu"), Device("cpu", 0)),
        (torch.device("cpu", 3), Device("cpu", 3)),
        (torch.device("cuda"), Device("cuda", 0)),
        (torch.device("cuda:1"), Device("cuda", 1)),
        (Device("cpu", 1, own_memory=True), Device("cpu", 1, own_memory=True)),
        ("cuda:1", Device("cuda", 1)),
    ],
    ids=repr,
)
def test_one_device_needs_no_list(gpus, wanted, found):
    gpus("A", "A")
    assert find_devices(wanted) == find_devices([wanted]) == (found,)
    assert as_device(wanted) == found


def test_a_device_keeps_its_own_threads():
    assert find_devices(Device("cpu", 1, threads=2), threads=3) == (Device("cpu", 1, threads=2),)
    assert find_devices(torch.device("cpu"), threads=3) == (Device("cpu", 0, threads=3),)
    assert find_devices(find_devices(3)) == find_devices(3)


@pytest.mark.parametrize("make", [evenstep.Engine, trainer_on])
def test_engines_and_trainers_accept_the_same(make):
    assert make(torch.device("cpu")).devices == (Device("cpu", 0),)
    assert make(Device("cpu", 2)).devices == (Device("cpu", 2),)
    assert make("2").devices == make(2).devices
    with pytest.raises(DeviceError, match="got devices of type float"):
        make(1.0)


NO_NAMES = ("", "gpu", "cpu:", "cpu:-1", "cpu:x", "CPU:0", "cuda:0:own", "cpu:0:mine", "cpu:0 1")
TWICE = ("cpu:0,cpu:5:own,cpu", ["cpu:0", "cpu:1", "cpu"], ("cpu:0", "cpu:0"))
WRONG_ITEMS = ([0, 1], ["cpu:0", 1], b"cpu", {1: "cpu"})
REFUSED = [
    *((text, f"got device {text!r}: write cpu:0, cpu:1, ..., cuda:0") for text in NO_NAMES),
    *((text, "got device 'tpu:1': write") for text in ("cpu:0,tpu:1", ["cpu:0", "tpu:1"])),
    ("cpu:0,", "got device '': write"),
    (["auto"], "got device 'auto': write"),
    (torch.device("meta"), "got device 'meta': write"),
    *((count, f"got {count} devices: at least 1 is needed") for count in (0, -1, "0", "-3")),
    *((wanted, "got cpu:0 twice: give each CPU device a number of its own") for wanted in TWICE),
    *((wanted, "got an empty list of devices: name at least one") for wanted in ([], ())),
    (None, "got devices of type NoneType: give 'auto', a number of devices, a name"),
    (2.0, "got devices of type float"),
    (True, "got devices of type bool"),
    (torch.nn.Linear(1, 1), "got devices of type Linear"),
    *((wanted, "got a device of type int: give a name such as cpu:1") for wanted in WRONG_ITEMS),
    ([None], "got a device of type NoneType"),
    ([["cpu:0"]], "got a device of type list"),
]


@pytest.mark.parametrize(("wanted", "text"), REFUSED, ids=str)
def test_what_is_no_device_is_refused(wanted, text):
    with pytest.raises(DeviceError) as caught:
        find_devices(wanted)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("count", "wanted", "text"),
    [
        (0, ["cuda:0"], "got cuda:0, but torch sees 0 GPUs here: use CPU devices (cpu:0, "),
        (1, ["cuda:1"], "got cuda:1, but torch sees 1 GPU here: use cuda:0, or CPU devices"),
        (2, "cpu:0,cuda:2", "got cuda:2, but torch sees 2 GPUs here: use cuda:0 to cuda:1, or CPU"),
        (2, 3, "got cuda:2, but torch sees 2 GPUs here"),
    ],
    ids=str,
)
def test_gpus_that_are_not_there_are_refused(gpus, count, wanted, text):
    gpus(*["A"] * count)
    with pytest.raises(DeviceError) as caught:
        find_devices(wanted)
    assert str(caught.value).startswith(text)


# ---- cores: affinity and control groups


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(4, None, 4), (4, 2.0, 2), (2, 8.0, 2), (4, 2.9, 2), (4, 0.5, 1), (1, None, 1)],
)
def test_usable_cores_are_bounded_by_affinity_and_quota(monkeypatch, affinity, quota, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(discovery, "cgroup_quota_cores", lambda: quota)
    assert usable_cores() == usable


def test_without_affinity_every_core_counts(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(discovery, "cgroup_quota_cores", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def write_tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def quota_of(tmp_path, proc, files):
    write_tree(tmp_path, {"proc": proc, **{f"cgroup/{path}": text for path, text in files.items()}})
    return cgroup_quota_cores(tmp_path / "cgroup", tmp_path / "proc")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"a/b/cpu.max": "200000 100000\n"}, 2.0),
        ({"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"a/b/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "30000 10000\n"}, 3.0),
        ({"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "30000 10000\n"}, 1.0),
        ({"a/b/cpu.max": "max 100000\n", "cpu.max": "50000 100000\n"}, 0.5),
        ({"a/c/cpu.max": "100000 100000\n"}, None),  # somebody else's group
        ({"a/b/c/cpu.max": "100000 100000\n"}, None),  # a child's
        ({"a/b/cpu.max": "\n"}, None),  # half written
        ({}, None),
    ],
    ids=str,
)
def test_quotas_of_cgroup_v2(tmp_path, files, cores):
    assert quota_of(tmp_path, "0::/a/b\n", files) == cores


def test_the_root_group_of_cgroup_v2(tmp_path):
    """What a container sees: its own group is the root of the tree."""
    assert quota_of(tmp_path, "0::/\n", {"cpu.max": "250000 100000\n"}) == 2.5


def test_nothing_above_the_tree_is_read(tmp_path):
    write_tree(tmp_path, {"cpu.max": "10000 100000\n"})
    assert quota_of(tmp_path, "0::/a\n", {"a/memory.max": "max\n"}) is None


V1_PROC = "9:memory:/box\n4:cpu,cpuacct:/box/run\n3:cpuset:/other\n1:name=systemd:/\n0::/x\n"


def v1(group, quota, period="100000"):
    return {
        f"cpu{group}/cpu.cfs_quota_us": f"{quota}\n",
        f"cpu{group}/cpu.cfs_period_us": f"{period}\n",
    }


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (v1("/box/run", 200000), 2.0),
        (v1("/box/run", 5000, 20000), 0.25),
        (v1("/box/run", -1), None),
        ({**v1("/box/run", -1), **v1("/box", 300000)}, 3.0),
        ({**v1("/box/run", 200000), **v1("", 100000)}, 1.0),
        (v1("", 400000), 4.0),  # inside a container, where the path of the host is not there
        (v1("/other", 100000), None),
        ({"memory/box/cpu.max": "100000 100000\n"}, None),
        ({"cpu/box/cpu.cfs_quota_us": "100000\n"}, None),  # half written
        ({**v1("/box/run", 300000), "x/cpu.max": "200000 100000\n"}, 2.0),  # of both versions
    ],
    ids=str,
)
def test_quotas_of_cgroup_v1(tmp_path, files, cores):
    assert quota_of(tmp_path, V1_PROC, files) == cores


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cgroup_quota_cores(tmp_path / "cgroup", tmp_path / "not there") is None


# ---- notes about a layout


SLOW = "threads of CPU devices share 2 cores: the result is the same, but no faster than with 2"
IDLE = "8 shards keep 8 of 64 devices busy: shards=64 uses them all (and is a different experiment)"
MIXED = "or thread counts: results are equal within rounding, not bit for bit"


@pytest.mark.parametrize(
    ("models", "devices", "shards", "lines"),
    [
        ((), ["cpu:0", "cpu:1"], 8, []),
        ((), [Device("cpu", 0, threads=2)], 1, []),
        ((), ["cpu:0", "cpu:1", "cpu:2"], 8, [f"3 {SLOW}"]),
        ((), [Device("cpu", 0, threads=3), Device("cpu", 1, True, 3)], 8, [f"6 {SLOW}"]),
        (("A",) * 64, "auto", 8, [IDLE]),
        (("A",) * 64, "auto", 64, []),
        (("H200", "L4", "L4"), ["cuda:1", "cuda:2"], 8, []),
        (("H200", "L4"), "auto", 8, [f"devices of different kinds (H200, L4) {MIXED}"]),
        (("H200",), ["cuda:0", "cpu:0"], 8, [f"devices of different kinds (H200, cpu) {MIXED}"]),
        (
            (),
            [Device("cpu", 0, threads=2), "cpu:1"],
            8,
            [f"3 {SLOW}", f"devices of different kinds (cpu) {MIXED}"],
        ),
    ],
    ids=str,
)
def test_notes_are_of_what_costs_time_or_bits(gpus, cores, models, devices, shards, lines):
    gpus(*models)
    cores(2)
    assert layout_notes(find_devices(devices), shards) == lines


# ---- settings of torch, restored at the end


def test_intra_op_threads_are_set_and_restored():
    torch.set_num_threads(2)
    with intra_op_threads(3):
        assert torch.get_num_threads() == 3
        with intra_op_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), intra_op_threads(3):
        _ = 1 / 0
    assert torch.get_num_threads() == 2


@pytest.fixture
def torch_settings():
    def read():
        return torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()

    before = read()
    yield read
    torch.backends.cudnn.benchmark = before[0]
    torch.use_deterministic_algorithms(before[1])


def test_settings_of_deterministic_kernels_are_put_back(torch_settings):
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_kernels([Device("cuda", 0)]):
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_gpus_alone_are_kept_to_deterministic_kernels(torch_settings):
    torch.backends.cudnn.benchmark = True
    with deterministic_kernels([Device("cuda", 0), Device("cpu", 0)]):
        assert torch_settings() == (False, True)
    assert torch_settings() == (True, False)
    with pytest.raises(ZeroDivisionError), deterministic_kernels([Device("cuda", 0)]):
        _ = 1 / 0
    assert torch_settings() == (True, False)
    with deterministic_kernels([Device("cpu", 0), Device("cpu", 1, own_memory=True)]):
        assert torch_settings() == (True, False)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("group", "files", "free"),
    [
        ("0::/job/step", {}, 5000 * 1024),
        (
            "0::/job/step",
            {
                "job/memory.max": "3000000\n",
                "job/memory.current": "2500000\n",
                "job/memory.stat": "file 7\ninactive_file 200000\n",
                "job/step/memory.max": "max\n",
                "job/step/memory.current": "2500000\n",
                "job/step/memory.stat": "inactive_file 0\n",
            },
            700_000,
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "3000000\n",
                "memory/job/memory.usage_in_bytes": "1000000\n",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            2_000_500,
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/job/memory.usage_in_bytes": "1000000\n",
                "memory/job/memory.stat": "total_inactive_file 0\n",
            },
            5000 * 1024,
        ),
    ],
)
def test_free_memory_is_what_linux_can_give_within_the_limits(tmp_path, group, files, free):
    meminfo = "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 5000 kB\n"
    proc = {"proc/meminfo": meminfo, "proc/self/cgroup": group + "\n"}
    write_tree(tmp_path, {**proc, **{f"cgroup/{path}": text for path, text in files.items()}})
    assert free_memory_nbytes(CPU, tmp_path / "cgroup", tmp_path / "proc") == free


def test_free_memory_elsewhere_is_that_of_the_machine_or_unknown(tmp_path, monkeypatch):
    given = CPU, tmp_path, tmp_path
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf_names", pages, raising=False)
    monkeypatch.setattr(os, "sysconf", pages.get, raising=False)
    assert free_memory_nbytes(*given) == 4096 * 1000
    monkeypatch.delattr(os, "sysconf")
    assert free_memory_nbytes(*given) is None
