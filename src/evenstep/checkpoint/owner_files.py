"""A checkpoint that several processes write: each a file with the state that it owns.

    step-00000040/
        tensors.safetensors       what every process has, and what the first process owns
        owner-00001.safetensors   the optimizer state that process 1 owns, and so on
        manifest.json             as ever, with the sizes and hashes of all files

The first process makes the hidden folder, and all write into it, so they must see one file system.
When every file is on the disk, the first process writes the manifest and renames the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evenstep.checkpoint.codec import Encoded, Plain
from evenstep.checkpoint.files import Description, write_checkpoint, write_owner_file
from evenstep.distributed import Exchange, Peers
from evenstep.errors import PeerError, SaveError, text_of

_EXCHANGE = Exchange("save", "the checkpoint")


def write_by_owners(
    peers: Peers, folder: Path, read: Callable[[], Encoded], *, step: int, keep: int
) -> Path:
    """Write a checkpoint, a file from each process, and return its folder; each must call this.

    `read` returns the training state, with the optimizer state that the first process owns; in the
    others only `{"optimizer": {"state": ...}}` with what they own. All processes give the same
    `folder`, on a file system that they share.

    Raises:
        SaveError: a file can't be written, or is not in the first process's folder; nothing was
            changed.
        PeerError: a process is lost.
    """
    if peers.rank == 0:
        return _First(peers).write(folder, read, step, keep)
    hidden = Path(_answer_of_first(_say(peers, {}))["path"])
    try:
        own = read()
        written: dict[str, Any] = {
            "file": write_owner_file(hidden, peers.rank, own),
            "plain": own.plain["optimizer"]["state"],
        }
    except Exception as error:
        written = {"error": text_of(error) or type(error).__name__}
    _answer_of_first(_say(peers, written))
    return Path(_answer_of_first(_say(peers, {}))["path"])


class _First:
    """The first process, which makes the folder and gives it its name when all is written."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def write(self, folder: Path, read: Callable[[], Encoded], step: int, keep: int) -> Path:
        """Write the checkpoint; an error is told to all others, who wait for the next word."""
        try:
            path = write_checkpoint(folder, read(), step=step, keep=keep, others=self._others)
        except PeerError:
            raise
        except Exception as error:
            _say(self._peers, {"error": text_of(error) or type(error).__name__})
            raise
        _say(self._peers, {"path": str(path)})
        return path

    def _others(self, hidden: Path) -> Callable[[Plain], tuple[Plain, Mapping[str, Description]]]:
        """Have all other processes write into `hidden`; return what waits for them."""
        _say(self._peers, {"path": str(hidden.absolute())})
        return self._collect

    def _collect(self, plain: Plain) -> tuple[Plain, Mapping[str, Description]]:
        """Return the state with what the others own, and their files."""
        answers = _say(self._peers, {})[1:]
        for rank, answer in enumerate(answers, 1):
            if "error" in answer:
                where = f"rank {rank} (on {self._peers.hosts[rank]})"
                raise SaveError(f"{where} could not write its part: {answer['error']}")
        whole = {**plain["optimizer"]}
        whole["state"] = _merged([whole["state"], *[answer["plain"] for answer in answers]])
        files = {name: about for answer in answers for name, about in [answer["file"]]}
        return {**plain, "optimizer": whole}, files


def _merged(states: list[Plain]) -> Plain:
    """Join encoded states of parameters, in the order of their numbers."""
    pairs = [pair for state in states for pair in _pairs(state)]
    if not pairs:
        return {}
    pairs.sort(key=lambda pair: (0, pair[0]) if isinstance(pair[0], int) else (1, 0))
    return {"$dict": pairs}


def _pairs(state: Plain) -> list[list[Plain]]:
    """Return what `encode` makes of a dict as pairs of key and value."""
    return state["$dict"] if "$dict" in state else [[key, value] for key, value in state.items()]


def _say(peers: Peers, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    answers = peers.gather(json.dumps(message).encode(), _EXCHANGE)
    return [json.loads(answer) for answer in answers]


def _answer_of_first(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first process has said; raise its error."""
    first = answers[0]
    if "error" in first:
        raise SaveError(first["error"])
    return first
