"""A model in one file: what comes back computes the same, without the model's source."""

import hashlib
import io
import os
import random
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

import evenstep
from commands import complaint, run, trained
from evenstep.errors import BatchError, ExportError, SaveError
from evenstep.inference import export as exporting
from evenstep.inference import onnx_export
from marks import slow
from reference import plain_outputs

MINE = """
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return {'sum': self.layer(x) + y}
"""


def networks():
    return {
        "mlp": (evenstep.models.mlp(), torch.randn(1, 1, 28, 28)),
        "lenet": (evenstep.models.lenet(), torch.randn(3, 1, 28, 28)),
        "resnet18": (evenstep.models.resnet18(), torch.randn(2, 1, 28, 28)),
    }


RESNET = slow("resnet18")


@pytest.mark.parametrize("name", ["mlp", "lenet", RESNET])
def test_the_file_computes_what_the_model_does_in_evaluation_mode(name, tmp_path):
    net, example = networks()[name]
    exported = evenstep.load_exported(evenstep.export(net, example, tmp_path / "it.pt2"))
    assert net.training
    for size in (1, 2, 7):
        images = torch.randn(size, 1, 28, 28)
        found = exported(images)
        assert not found.requires_grad
        torch.testing.assert_close(found, plain_outputs(net, images), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_runs_in_a_process_where_the_models_module_does_not_exist(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    make = (
        "import torch, evenstep, mine\n"
        "torch.manual_seed(0)\n"
        "net = mine.Mine()\n"
        "x, y = torch.randn(4, 3), torch.randn(4, 2)\n"
        "evenstep.export(net, (x[:2], y[:2]), 'it.pt2')\n"
        "torch.save((x, y, net(x, y)['sum'].detach()), 'expected.pt')\n"
    )
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").unlink()
    use = (
        "import torch, evenstep\n"
        "x, y, expected = torch.load('expected.pt')\n"
        "found = evenstep.load_exported('it.pt2')(x, y)['sum']\n"
        "torch.testing.assert_close(found, expected)\n"
    )
    subprocess.run([sys.executable, "-c", use], cwd=tmp_path, check=True)


@pytest.fixture
def file(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    return evenstep.export(net, torch.randn(2, 3, 4), tmp_path / "it.pt2")


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ((torch.ones(2, 3, 5),), r"got float32 \(batch, 3, 5\): .* needs float32 \(batch, 3, 4\)"),
        ((torch.ones(2, 3, 4).double(),), r"got float64 \(batch, 3, 4\)"),
        ((torch.ones(2, 3, 4), torch.ones(2)), r"got float32 \(batch, 3, 4\), float32 \(batch\)"),
        ((), "got nothing"),
        ((torch.ones(()),), "without a batch dimension"),
        (([1.0],), "got a list"),
        ((torch.ones(0, 3, 4),), r"inputs of \[0\] examples"),
    ],
)
def test_a_wrong_input_is_refused_in_one_line(file, inputs, part):
    with pytest.raises(BatchError, match=part) as caught:
        evenstep.load_exported(file)(*inputs)
    assert "\n" not in str(caught.value)


def flipped(content):
    at = content.index(b"evenstep export")
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "text": lambda content: b"hello",
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": flipped,
}


@pytest.mark.parametrize("kind", ["missing", *DAMAGES])
def test_a_bad_file_is_refused_in_one_line(file, kind):
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(DAMAGES[kind](file.read_bytes()))
    with pytest.raises(ExportError, match=r"\.pt2 (does not exist|is damaged)") as caught:
        evenstep.load_exported(file)
    assert "\n" not in str(caught.value)


def refusal(file, **options):
    with pytest.raises(ExportError) as caught:
        evenstep.load_exported(file, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flip_and_load(file, monkeypatch, places):
    """Flip one bit at each of `places`; each must be refused before torch reads the file."""
    content = bytearray(file.read_bytes())
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("torch has read it"))
    for place in places:
        content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        refusal(file)
        content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    monkeypatch.undo()
    evenstep.load_exported(file)


@pytest.mark.parametrize("flips", [100, slow(10_000)])
def test_a_flipped_bit_anywhere_is_refused_before_torch_reads_it(file, monkeypatch, flips):
    bits = 8 * file.stat().st_size
    flip_and_load(file, monkeypatch, random.Random(flips).sample(range(bits), flips))


def test_a_file_that_was_cut_or_made_longer_is_refused(file):
    content = file.read_bytes()
    for length in (*range(0, len(content), 97), len(content) - 1):
        file.write_bytes(content[:length])
        refusal(file)
    for more in (b"\0", b"x" * 100, content):
        file.write_bytes(content + more)
        refusal(file)


def sha256_of(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("spell", [str, str.upper], ids=["lower", "upper"])
def test_a_file_with_the_digest_that_was_given_is_loaded(file, spell):
    loaded = evenstep.load_exported(file, sha256=spell(sha256_of(file)))
    assert loaded(torch.ones(5, 3, 4)).shape == (5, 2)


def test_a_whole_file_that_is_another_one_is_refused_before_torch_reads_it(file, monkeypatch):
    """Its own digest fits, as that of any file would that somebody else has exported."""
    wanted, other = sha256_of(file), evenstep.export(nn.Flatten(), torch.ones(2, 3, 4), file)
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("torch has read it"))
    line = refusal(other, sha256=wanted)
    assert line == (
        f"{file} is not the file that was asked for: its SHA-256 is {sha256_of(other)}, not "
        f"{wanted}; get the right file, or the digest of this one from someone you trust"
    )


@pytest.mark.parametrize(
    "sha256",
    ["", "abc", "x" * 64, 64 * "\N{ARABIC-INDIC DIGIT ONE}", 5, b"0" * 64],
    ids=["empty", "short", "letters", "arabic", "number", "bytes"],
)
def test_what_is_no_digest_is_refused(file, sha256):
    line = refusal(file, sha256=sha256)
    assert line == f"got sha256={sha256!r}: give the 64 hexadecimal digits of a SHA-256"


def without_digest(file):
    """Make of a file what evenstep 0.1.0 wrote."""
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b""
    return file


def test_a_file_without_a_digest_needs_that_of_the_user(file):
    line = refusal(without_digest(file))
    assert line == (
        f"{file} contains no digest, as files of evenstep 0.1.0 don't, so damage would not be "
        f"noticed: export it again, or give load_exported sha256=..., the SHA-256 of the file"
    )
    loaded = evenstep.load_exported(file, sha256=sha256_of(file))
    assert loaded(torch.ones(5, 3, 4)).shape == (5, 2)


def test_other_programs_can_read_the_file(file):
    """The digest is the comment of a zip archive, which torch and zipfile skip."""
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    assert torch.export.load(file).module()(torch.ones(5, 3, 4)).shape == (5, 2)


def archive_of(file, **entries):
    """Write an archive with these entries, and the digest that a forger would put in."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    file.write_bytes(exporting._sealed(content.getvalue()))
    return file


NOTE = '{"format": "evenstep export", "version": 1, "inputs": []}'


ODD = {
    "a long note": (
        {"a/evenstep.json": NOTE + " " * 10**8},
        f"unpacks to {len(NOTE) + 10**8} bytes",
    ),
    "a bomb": (
        {"a/evenstep.json": NOTE, "a/w": b"\0" * 10**8},
        f"unpacks to {len(NOTE) + 10**8} bytes",
    ),
    "a deep note": ({"a/evenstep.json": "[" * 10**5}, "unpacks to 100000 bytes"),
    "up": ({"a/evenstep.json": NOTE, "../../evil": "x"}, "the entry ../../evil"),
    "absolute": ({"a/evenstep.json": NOTE, "/etc/evil": "x"}, "the entry /etc/evil"),
    "backslash": ({"a/evenstep.json": NOTE, "a\\..\\evil": "x"}, "the entry a\\..\\evil"),
    "a list": ({"a/evenstep.json": "[]"}, "TypeError"),
    "a number": ({"a/evenstep.json": "3"}, "TypeError"),
    "no inputs": ({"a/evenstep.json": NOTE.replace("[]", "3")}, "TypeError"),
    "a dtype": (
        {"a/evenstep.json": NOTE.replace("[]", '[{"dtype": 3, "shape": []}]')},
        "3 [] of an input",
    ),
    "a shape": (
        {"a/evenstep.json": NOTE.replace("[]", '[{"dtype": "x", "shape": "yz"}]')},
        "'x' 'yz' of an input",
    ),
    "no note": ({"a/other.json": NOTE}, "ValueError"),
    "two notes": ({"a/evenstep.json": NOTE, "b/evenstep.json": NOTE}, "ValueError"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_archive_of_odd_shape_is_refused_before_memory_is_taken(file, monkeypatch, name):
    entries, problem = ODD[name]
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("torch has read it"))
    assert problem in refusal(archive_of(file, **entries))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "it.pt2")
    assert "can't be read" in refusal(tmp_path / "it.pt2")


def test_an_endless_device_is_refused_at_once():
    assert "it is not a regular file" in refusal("/dev/zero")


class BranchesOnValues(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_is_no_program_says_why(tmp_path):
    with pytest.raises(ExportError, match=r"BranchesOnValues can't be exported: .*not on values"):
        evenstep.export(BranchesOnValues(), torch.ones(2, 3), tmp_path / "it.pt2")
    assert list(tmp_path.iterdir()) == []


class SaysThatItBranches(BranchesOnValues):
    def forward(self, x):
        print("branching", file=sys.stderr)
        return super().forward(x)


def test_what_torch_has_recorded_until_then_is_not_printed(tmp_path, capfd):
    for model in (BranchesOnValues(), SaysThatItBranches()):
        with pytest.raises(ExportError):
            evenstep.export(model, torch.ones(2, 3), tmp_path / "it.pt2")
    assert capfd.readouterr() == ("", "branching\n")


@pytest.mark.parametrize(
    ("example", "part"),
    [
        ([torch.ones(2)], "give a tensor, or a tuple"),
        ((), "give a tensor, or a tuple"),
        (torch.ones(()), "batch dimension"),
        ((torch.ones(2, 1), torch.ones(3, 1)), r"have \[2, 3\] rows"),
    ],
)
def test_a_bad_example_is_refused(tmp_path, example, part):
    with pytest.raises(ExportError, match=part):
        evenstep.export(nn.Identity(), example, tmp_path / "it.pt2")


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ExportError, match=r"ends in \.pt2 or \.onnx"):
        evenstep.export(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "it.pth")


def test_a_folder_that_is_missing_is_part(tmp_path):
    with pytest.raises(SaveError, match="can't be written"):
        evenstep.export(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "none" / "it.pt2")


def test_the_command_exports_a_run_and_says_how_far_it_is_off(tmp_path):
    folder, file = tmp_path / "run", tmp_path / "it.pt2"
    trained("--model", "mlp", "--steps", 3, "--checkpoint-dir", folder)
    for checkpoint in (folder, folder / "step-00000003"):
        part = run("export", "--checkpoint", checkpoint, "--out", file).stdout
        assert "float32 (batch, 1, 28, 28)" in part
        assert "max difference" in part
        assert f"sha256          {sha256_of(file)}" in part
    assert evenstep.load_exported(file)(torch.zeros(5, 1, 28, 28)).shape == (5, 10)
    pytest.importorskip("onnxruntime", reason="pip install evenstep[onnx]")
    other = file.with_suffix(".onnx")
    part = run("export", "--checkpoint", folder, "--out", other).stdout
    assert "onnxruntime" in part
    assert sha256_of(other) in part
    assert other.stat().st_size > 100_000


def test_the_command_refuses_what_is_no_run(tmp_path):
    line = complaint("export", "--checkpoint", tmp_path, "--out", tmp_path / "it.pt2", code=2)
    assert "no checkpoint in" in line


# What the book says of symbolic programs, and what happens here


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        print("computing")
        return self.layer(x)


def test_a_print_happens_while_the_program_is_recorded_and_never_again(tmp_path, capsys):
    file = evenstep.export(Talks(), torch.ones(2, 4), tmp_path / "it.pt2")
    assert "computing" in capsys.readouterr().out
    evenstep.load_exported(file)(torch.ones(3, 4))
    assert capsys.readouterr().out == ""


class WritesInPlace(nn.Module):
    def forward(self, x):
        hidden = x * 2
        hidden += 1
        hidden[:, 0] = 0
        return hidden


refused_by_torch_2_6 = pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.6 refuses it")


@refused_by_torch_2_6
def test_in_place_operations_on_what_the_model_has_made_are_part_of_the_program(tmp_path):
    file = evenstep.export(WritesInPlace(), torch.ones(2, 4), tmp_path / "it.pt2")
    x = torch.randn(5, 4)
    assert evenstep.load_exported(file)(x).equal(WritesInPlace()(x))


class LoopsOverRows(nn.Module):
    """A loop whose length is a shape: it is unrolled for the example's, so another is refused."""

    def forward(self, x):
        return torch.stack([row * number for number, row in enumerate(x)])


def test_a_loop_over_the_examples_is_refused_for_its_length_would_be_fixed(tmp_path):
    with pytest.raises(ExportError, match="LoopsOverRows can't be exported"):
        evenstep.export(LoopsOverRows(), torch.ones(3, 4), tmp_path / "it.pt2")


class RandomInPython(nn.Module):
    def forward(self, x):
        return x * random.random()


class KeepsInAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(())

    def forward(self, x):
        self.mean = self.mean + x.mean()
        return x + self.mean


@pytest.mark.parametrize(
    "kind", [RandomInPython, pytest.param(KeepsInAttribute, marks=refused_by_torch_2_6)]
)
def test_what_is_no_tensor_of_the_program_is_the_recorded_one_for_ever(kind, tmp_path):
    file = evenstep.export(kind(), torch.ones(2, 4), tmp_path / "it.pt2")
    exported = evenstep.load_exported(file)
    assert exported(torch.ones(1, 4)).equal(exported(torch.ones(1, 4)))


# ONNX


@pytest.mark.parametrize("name", ["mlp", slow("lenet"), RESNET])
def test_onnxruntime_computes_the_same_of_any_batch_size(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="pip install evenstep[onnx]")
    net, example = networks()[name]
    file = evenstep.export(net, example, tmp_path / "it.onnx")
    assert net.training
    session = runtime.InferenceSession(file.read_bytes())
    (given,) = session.get_inputs()
    for size in (1, 5):
        images = torch.randn(size, 1, 28, 28)
        (found,) = session.run(None, {given.name: images.numpy()})
        expected = plain_outputs(net, images)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_no_onnx_says_why(tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install evenstep[onnx]")
    with pytest.raises(ExportError, match="BranchesOnValues can't be written as ONNX") as caught:
        evenstep.export(BranchesOnValues(), torch.ones(2, 3), tmp_path / "it.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_differ_are_noticed(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="pip install evenstep[onnx]")
    run_it = onnx_export._run
    monkeypatch.setattr(onnx_export, "_run", lambda *args: [one + 0.1 for one in run_it(*args)])
    with pytest.raises(ExportError, match=r"differ from those of Linear by 1\.0e-01: nothing"):
        evenstep.export(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "it.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_for_onnx_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_NEEDED", ("onnx", "no_such_package"))
    with pytest.raises(ExportError, match=r"no_such_package is missing: pip install"):
        evenstep.export(nn.Linear(2, 2), torch.ones(2, 2), tmp_path / "it.onnx")
