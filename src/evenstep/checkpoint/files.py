"""Checkpoints as folders: written as a whole or not at all, read exactly or refused.

    folder/
        step-00000020/          an earlier checkpoint
        step-00000040/
            tensors.safetensors every tensor of the state (those that other processes own are in
                                files of their own, see `owner_files`)
            manifest.json       everything else, with the size and SHA-256 of the other files,
                                and last a SHA-256 of everything before it

A checkpoint is written to a hidden folder beside its place, flushed to the disk and then renamed.
If the process or the machine stops at any moment, earlier checkpoints stay whole: the order of
flushes and renames is that of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from evenstep.checkpoint.codec import Encoded, Plain, Tree, decode
from evenstep.errors import CheckpointError, InputError, SaveError
from evenstep.files import flush, read_file, sha256_of

_StrPath: TypeAlias = "str | os.PathLike[str]"

Description: TypeAlias = "dict[str, int | str]"
"""The size and the SHA-256 of a file."""

Others: TypeAlias = "Callable[[Path], Callable[[Plain], tuple[Plain, Mapping[str, Description]]]]"
"""Called with the folder that other processes shall write into; the result waits for them, and
turns the state into one that refers to their files, too."""

_FORMAT = "evenstep checkpoint"
_VERSIONS = (1, 2)  # with one file of tensors, and with several
_MANIFEST = "manifest.json"
_TENSORS = "tensors.safetensors"
_OWNERS = re.compile(r"owner-\d{5,}\.safetensors")
_MOST_NBYTES = 1 << 28  # of a manifest, which has some hundred bytes for each tensor

# `.old` is a checkpoint that another of the same step replaces: it counts until the other is there.
_CHECKPOINT = re.compile(r"step-(?P<step>\d{8}|[1-9]\d{8,})(?P<old>\.old)?")
# Version 0.1.0 wrote no token behind the process.
_HIDDEN = re.compile(
    r"\.step-\d{8,}(\.old)?\.(writing|removing)-(?P<host>.*)-(?P<pid>\d+)"
    r"(\.(?P<token>[0-9a-f]{16}))?"
)
_own_tokens = set[str]()

_SAVE_ADVICE = {
    errno.ENOSPC: "free some space, or save to a different disk",
    errno.EDQUOT: "free some of your quota, or save to a different disk",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save to a different disk",
    errno.EROFS: "save to a folder that can be written",
    errno.EACCES: "save to a folder that you may write",
    errno.EPERM: "save to a folder that you may write",
    errno.ENOTDIR: "give a folder, not a file",
    errno.EEXIST: "give a folder, not a file",
}


def write_checkpoint(
    folder: _StrPath, state: Encoded, *, step: int, keep: int = 3, others: Others | None = None
) -> Path:
    """Write the state after `step` steps, and return its folder `step-...` inside `folder`.

    `folder` is created if it is missing; a checkpoint of the same step is replaced. Once the new
    checkpoint is on the disk, checkpoints of smaller steps are removed until `keep` are left, the
    new one included. Half-written checkpoints of processes of this machine that have ended are
    removed too. A warning names what could not be removed. Only one process at a time may write to
    a folder, but for those that `others` lets write files of their own into the new checkpoint.

    Raises:
        InputError: `step` is negative, or `keep` less than 1.
        SaveError: it could not be written (full disk, read-only folder, ...); nothing was changed.
    """
    if step < 0 or keep < 1:
        raise InputError(f"got step {step} and keep {keep}: give a step >= 0 and keep >= 1")
    folder = Path(folder)
    final = checkpoint_of(folder, step)
    try:
        _make_folder(folder)
        _remove_leftovers(folder)
        with _hidden_folder(final) as hidden:
            _write_files(hidden, state, step, others)
            _move_into_place(hidden, final)
    except OSError as error:
        nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
        raise SaveError(_explain_save(error, final, nbytes)) from error
    _remove_earlier(final, keep)
    return final


def checkpoint_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved, from its name."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match["step"])


def list_checkpoints(folder: _StrPath) -> list[Path]:
    """Return the checkpoints in `folder`, the smallest step first; none if it doesn't exist.

    Raises:
        CheckpointError: the folder can't be read.
    """
    folder = Path(folder)
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error
    by_step: dict[int, str] = {}
    for name in sorted(names, reverse=True):  # `.old` first: the one that replaced it counts
        if match := _CHECKPOINT.fullmatch(name):
            by_step[int(match["step"])] = name
    return [folder / name for _, name in sorted(by_step.items())]


def latest_checkpoint(folder: _StrPath) -> Path:
    """Return the checkpoint in `folder` with the largest step.

    Raises:
        CheckpointError: there is none.
    """
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    folder = Path(folder)
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is no such folder"
    else:
        names = sorted(entry.name for entry in folder.iterdir())
        found = f"it holds {', '.join(names[:4]) or 'nothing'}" + ", ..." * (len(names) > 4)
    raise CheckpointError(
        f"no checkpoint in {folder}: looked for a folder named step-00000000 or so, but {found}; "
        f"give the folder that the training was saved to"
    )


def read_checkpoint(folder: _StrPath, prune: Callable[[Plain], Plain] | None = None) -> Tree:
    """Return the tree whose encoding was written, its tensors on the CPU (see `decode`).

    `folder` is one checkpoint, or holds several: then the one with the largest step is read, and
    never an older one in its place. Format, version, sizes and hashes are checked before anything
    is decoded. Tensors that `prune` takes out of the encoded tree are not read into memory.

    Raises:
        CheckpointError: it is missing, half-written, truncated, damaged, of a different program, or
            of a newer version; the message names the file and says what to do.
    """
    folder = Path(folder)
    try:
        if not (_CHECKPOINT.fullmatch(folder.name) or (folder / _MANIFEST).exists()):
            folder = latest_checkpoint(folder)
        manifest = _read_manifest(folder)
        _check_tensor_files(folder, manifest)
        plain = manifest["state"] if prune is None else prune(manifest["state"])
        return _decode_files(folder, manifest, plain)
    except FileNotFoundError as error:
        lack = f"lacks {Path(error.filename).name}" if folder.is_dir() else "is not there"
        raise _unusable(folder, lack) from error
    except OSError as error:
        raise _unreadable(folder, error) from error
    except (LookupError, TypeError) as error:
        raise _unusable(folder / _MANIFEST, f"lacks a field ({error!r})") from error


def write_owner_file(folder: Path, owner: int, own: Encoded) -> tuple[str, Description]:
    """Write the tensors that a process owns into a checkpoint that another process makes.

    Returns:
        The file's name, and its size and SHA-256.
    """
    path = folder / f"owner-{owner:05d}.safetensors"
    _save_tensors(own.tensors, path)
    flush(path)
    return path.name, _describe(path)


def _write_files(folder: Path, state: Encoded, step: int, others: Others | None) -> None:
    wait = None if others is None else others(folder)
    _save_tensors(state.tensors, folder / _TENSORS)
    plain, files = (state.plain, {}) if wait is None else wait(state.plain)
    for name, about in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != about["nbytes"]:
            raise SaveError(
                f"{name}, which another process has written, is not in {folder}: give all "
                f"processes the same folder, on a file system that they share"
            )
    manifest = {
        "format": _FORMAT,
        "version": 2 if files else 1,
        "evenstep": _own_version(),
        "torch": torch.__version__,
        "step": int(step),
        "files": {_TENSORS: _describe(folder / _TENSORS), **files},
        "state": plain,
    }
    (folder / _MANIFEST).write_bytes(_seal(_spell_fields(manifest)))
    for name in (_TENSORS, *files):
        shutil.copymode(folder / _MANIFEST, folder / name)  # safetensors makes it private
    _admit_others(folder, stat.S_IMODE((folder / _MANIFEST).stat().st_mode))
    for path in (folder / _TENSORS, folder / _MANIFEST, folder):
        flush(path)


def _admit_others(folder: Path, mode: int) -> None:
    """Give a folder that was private the permissions that the umask leaves; `mode` is a file's."""
    kept = folder.stat().st_mode & (stat.S_ISGID | stat.S_ISVTX)
    folder.chmod(kept | 0o700 | mode | (mode & 0o444) >> 2)


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        code, reason = (int(match[1]), os.strerror(int(match[1]))) if match else (0, str(error))
        raise OSError(code, reason, str(path)) from error


def _spell_fields(manifest: dict[str, Any]) -> bytes:
    fields = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in manifest.items())
    return ("{\n" + ",\n".join(fields)).encode("ascii")


def _seal(body: bytes) -> bytes:
    """Close the JSON object `body` with the SHA-256 of all bytes before it."""
    return body + b',\n"sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode("ascii")


def _is_sealed(text: bytes) -> bool:
    body = text[: len(text) - len(_seal(b""))]
    return text == _seal(body)


def _describe(path: Path) -> dict[str, int | str]:
    return {"nbytes": path.stat().st_size, "sha256": sha256_of(path)}


def _own_version() -> str:
    try:
        return importlib.metadata.version("evenstep")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (run from its sources)"


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


@contextlib.contextmanager
def _hidden_folder(final: Path) -> Iterator[Path]:
    hidden = _hide(final, "writing")
    hidden.mkdir(0o700)  # nobody else can put links where files will be written
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)  # it doesn't exist any more if it was renamed


def _move_into_place(hidden: Path, final: Path) -> None:
    """Rename `hidden`; a checkpoint of this step that is replaced is listed until then."""
    aside = final.with_name(f"{final.name}.old")
    if final.is_dir():
        _remove(aside)
        final.replace(aside)
    hidden.replace(final)
    flush(final.parent)
    _remove(aside)


def _remove_earlier(final: Path, keep: int) -> None:
    earlier = [one for one in list_checkpoints(final.parent) if step_of(one) < step_of(final)]
    for path in earlier[: max(0, len(earlier) + 1 - keep)]:
        _remove(path)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed have left half-written or half-removed."""
    for entry in list(folder.iterdir()):
        if _is_leftover(entry):
            _remove(entry)


def _is_leftover(entry: Path) -> bool:
    if entry.is_symlink():
        return False
    if match := _HIDDEN.fullmatch(entry.name):
        return match["host"] == platform.node() and not _is_written(match)
    match = _CHECKPOINT.fullmatch(entry.name)
    return bool(match and match["old"] and entry.with_suffix("").is_dir())


def _is_written(hidden: re.Match[str]) -> bool:
    """Whether a process of this machine may still write to a hidden folder.

    A process may have the ID of an earlier one: in a container it usually has.
    """
    if int(hidden["pid"]) == os.getpid():
        return hidden["token"] in _own_tokens
    return _is_alive(int(hidden["pid"]))


def _remove(path: Path) -> None:
    """Remove a folder, if it exists; hide it first, so that half of one is never listed."""
    try:
        if not path.name.startswith("."):
            path = path.replace(_hide(path, "removing"))
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        warnings.warn(f"{path} could not be removed ({error}): remove it by hand", stacklevel=2)


def _hide(path: Path, doing: str) -> Path:
    token = secrets.token_hex(8)
    _own_tokens.add(token)
    return path.with_name(f".{path.name}.{doing}-{platform.node()}-{os.getpid()}.{token}")


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # where `kill` ends the process whatever the signal: none is asked
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def _read_manifest(folder: Path) -> dict[str, Any]:
    text = read_file(folder / _MANIFEST, at_most=_MOST_NBYTES)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        raise _unusable(folder / _MANIFEST, "is truncated, damaged or not evenstep's") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _unusable(folder / _MANIFEST, f"is not the manifest of an {_FORMAT}")
    if not _is_sealed(text):
        raise _unusable(folder / _MANIFEST, "is damaged (its SHA-256 does not match)")
    if manifest["version"] not in _VERSIONS:
        raise CheckpointError(
            f"{folder / _MANIFEST} is of version {manifest['version']}, but this evenstep reads "
            f"versions up to {_VERSIONS[-1]}: read it with evenstep {manifest.get('evenstep')}"
        )
    return manifest


def _check_tensor_files(folder: Path, manifest: dict[str, Any]) -> None:
    _ = manifest["files"][_TENSORS]
    for name, needed in manifest["files"].items():
        if name != _TENSORS and not _OWNERS.fullmatch(name):
            raise _unusable(
                folder / _MANIFEST, f"names a file that is none of a checkpoint: {name}"
            )
        path = folder / name
        nbytes = path.stat().st_size
        if nbytes != needed["nbytes"]:
            raise _unusable(path, f"has {nbytes} bytes, but {needed['nbytes']} were written")
        if _describe(path) != needed:
            raise _unusable(path, "is damaged (its SHA-256 does not match)")


def _decode_files(folder: Path, manifest: dict[str, Any], plain: Plain) -> Tree:
    try:
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(safe_open(folder / name, framework="pt"))
                for name in manifest["files"]
            ]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            return decode(plain, lambda name: places[name].get_tensor(name))
    except (CheckpointError, SafetensorError) as error:
        raise _unusable(folder, f"was not written by evenstep ({error})") from error


def _explain_save(error: OSError, final: Path, nbytes: int) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        reason = f"{error.filename} is in the way"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(folder for folder in final.parents if folder.is_dir())
        reason += f", {shutil.disk_usage(place).free} bytes are free"
    advice = _SAVE_ADVICE.get(error.errno or 0, "fix this, or save to a different folder")
    return (
        f"{final} could not be written: {reason}, about {nbytes} bytes are needed; {advice} "
        f"(the checkpoints so far are untouched)"
    )


def _unreadable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename or folder} can't be read ({error.strerror}): "
        f"give a folder of checkpoints that you may read"
    )


def _unusable(path: Path, problem: str) -> CheckpointError:
    """Return the error for a checkpoint or one of its files, with the earlier one to use."""
    folder = path if _CHECKPOINT.fullmatch(path.name) else path.parent
    checkpoints = list_checkpoints(folder.parent) if _CHECKPOINT.fullmatch(folder.name) else []
    earlier = [other for other in checkpoints if _step_of(other) < _step_of(folder)]
    advice = (
        f"use the earlier {earlier[-1]}"
        if earlier
        else "there is no earlier one beside it: give a different folder, or start again"
    )
    return CheckpointError(f"{path} {problem}; {advice}")


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-").removesuffix(".old"))
