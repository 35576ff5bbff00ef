"""How the C part is compiled: for which systems, and with what name of a wheel."""

import platform
import stat
import subprocess
import sys

import pytest

from evenstep.arithmetic import compile as compiling


@pytest.fixture
def compiler(tmp_path):
    """A C compiler that writes down what it is told, and makes empty files."""
    program, told = tmp_path / "cc", tmp_path / "told.txt"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{told}"\nfor out; do :; done; : > "$out"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def compiled(target):
        libraries = compiling.compile_all(tmp_path / "lib", str(program), target)
        return libraries, told.read_text(encoding="utf-8").splitlines()

    return compiled


def on(monkeypatch, system, machine, libc=("", "")):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_on_macos_one_kind_of_processor_is_compiled_for(machine, compiler, monkeypatch):
    """Also by a compiler, or for a Python, that makes programs for two ("universal2")."""
    on(monkeypatch, "darwin", machine)
    libraries, told = compiler(None)
    assert [one.name for one in libraries] == [
        f"{variant}.so" for variant in compiling.VARIANTS[compiling.machine()]
    ]
    assert told
    for line in told:
        assert f"-arch {machine} -mmacosx-version-min=11.0 " in line
        assert "-ffp-contract=off" in line
    assert compiling.platform_tag(libraries) == f"macosx_11_0_{machine}"


def test_on_windows_a_line_says_that_nothing_is_compiled(compiler, monkeypatch):
    on(monkeypatch, "win32", "AMD64")
    with pytest.raises(OSError, match="is compiled on Linux and macOS only"):
        compiler(None)


def test_the_order_of_what_is_linked_does_not_depend_on_the_disk(compiler):
    _, told = compiler("aarch64")
    (linked,) = [line.split() for line in told if line.startswith("-shared")]
    parts = [word for word in linked if word.endswith(".o")]
    assert len(parts) == len([*compiling.SOURCES.glob("*.c")])
    assert parts == sorted(parts)


def test_the_name_of_a_wheel_says_which_glibc_its_libraries_need(tmp_path, monkeypatch):
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.14\0")
    new.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0")
    on(monkeypatch, "linux", "x86_64", ("glibc", "2.36"))
    assert compiling.platform_tag([old]) == "manylinux_2_17_x86_64"
    assert compiling.platform_tag([old, new]) == "manylinux_2_34_x86_64"
    on(monkeypatch, "linux", "x86_64", ("musl", "1.2"))
    assert compiling.platform_tag([old]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux's libraries")
def test_the_libraries_need_nothing_but_an_old_c_library():
    libraries = [*compiling.LIBRARIES.glob("*.so")]
    if not libraries:
        pytest.skip("there is no C compiler")
    for library in libraries:
        said = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
        needed = {line.split()[0].split("/")[-1].split(".")[0] for line in said.splitlines()}
        assert needed - {"linux-vdso"} <= {"libc", "ld-linux-x86-64", "ld-linux-aarch64"}
    tag = f"manylinux_2_17_{platform.machine()}"
    assert compiling.platform_tag(libraries) in (tag, None)
