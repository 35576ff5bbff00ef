"""Builds a release twice, checks it, and tries its wheel alone: `python dist.py OUT WORK TESTS...`.

What is built is the commit that is checked out, not what lies beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]
MOST_NBYTES = 2_000_000
"""The largest wheel. Two fifths are the C part; what measures is 4%, and belongs to commands."""


def say(line):
    print(line, flush=True)


def run(*command, folder=ROOT, **variables):
    """Run a command and return what it prints; end the program if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(words)} failed")
    return done.stdout


def digests(folder):
    """Return the SHA-256 of each file in a folder, by name."""
    files = sorted(Path(folder).iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def build(revision, source, out, umask):
    """Build sdist and wheel of a commit, in a folder made for that."""
    source.mkdir(parents=True)
    archive = source.with_suffix(".tar")
    run("git", "archive", "--output", archive, revision)
    shutil.unpack_archive(archive, source)
    seconds = run("git", "log", "-1", "--format=%ct", revision).strip()
    given = [sys.executable, "-m", "build", "--outdir", out, source]
    before = os.umask(umask)
    try:
        run(*given, SOURCE_DATE_EPOCH=seconds)
    finally:
        os.umask(before)
    return digests(out)


def check(out):
    """Check metadata, size, and that the wheel's name says what systems can run it."""
    (wheel,), files = out.glob("*.whl"), sorted(out.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    if wheel.stat().st_size > MOST_NBYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, above {MOST_NBYTES:,}")
    audit = run(sys.executable, "-m", "auditwheel", "show", wheel)
    (fits,) = re.findall(r'constrains the platform tag to\s+"([^"]+)"', audit) or [""]
    if not wheel.stem.endswith(f"-py3-none-{fits}"):
        sys.exit(f"{wheel.name} is named wrongly: {audit}")
    return wheel


def interpreters():
    """Return the interpreters that are here, by version."""
    found = {}
    for version in PYTHONS:
        pyenv = Path.home() / ".pyenv" / "versions"
        installed = [
            *pyenv.glob(f"{version}.*/bin/python{version}"),
            shutil.which("python" + version),
        ]
        for one in filter(None, installed):
            asked = [one, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
            said = subprocess.run(asked, capture_output=True, text=True)
            if said.stdout.strip() == version:
                found[version] = str(one)
                break
    return found


def environment(folder, python, *packages):
    """Make a virtual environment with packages, and return its folder of programs."""
    run(python, "-m", "venv", "--clear", folder)
    programs = folder / "bin"
    pip = [programs / "pip", "install", "--quiet", "--disable-pip-version-check"]
    for some in (["torch"], packages):
        run(*pip, "-c", ROOT / "constraints.txt", *some)
    return programs


def main():
    out, work, *tests = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), *sys.argv[3:]
    for folder in (out, work):
        shutil.rmtree(folder, ignore_errors=True)
    revision = run("git", "rev-parse", "HEAD").strip()
    first = build(revision, work / "source", out, 0o022)
    again = build(revision, work / "another" / "place", work / "again", 0o077)
    if first != again:
        sys.exit(f"two builds of one commit differ: {first} and {again}")
    wheel = check(out)
    say(f"{', '.join(first)}: the same bytes twice; {wheel.stat().st_size:,} bytes")
    program = work / "readme.py"
    program.write_text(run(sys.executable, "benchmarks/readme_program.py"), encoding="utf-8")
    pythons, fingerprints = interpreters(), set()
    for version in PYTHONS:
        if version not in pythons:
            say(f"Python {version}: is not here")
            continue
        programs = environment(work / version, pythons[version], wheel)
        assert "Usage: evenstep" in run(programs / "evenstep", "--help", folder=work)
        assert (work / version) in Path(
            run(programs / "python", "-c", "import evenstep as e; print(e.__file__)", folder=work)
        ).parents
        portable = ["--model", "mlp", "--steps", "2", "--arithmetic", "portable"]
        run(programs / "evenstep", "train", *portable, folder=work)
        fingerprints.add(run(programs / "python", program, folder=work).split()[-1])
        say(f"Python {version}: --help, portable arithmetic and the README's program work")
    say(f"fingerprint of the README's program, short: {', '.join(sorted(fingerprints))}")
    if tests:
        needed = [f"{wheel}[test]"]
        programs = environment(work / "tests", sys.executable, *needed)
        run(programs / "python", "-m", "pytest", "-m", "not slow", *tests)
        say(f"{len(tests)} files of tests pass with the wheel")


if __name__ == "__main__":
    main()
