"""Downloads a published file once, and verifies its checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from evenstep.errors import DataError

CHUNK_NBYTES = 1 << 16
MOST_NBYTES = 1 << 30
ALTERNATIVE = "download the file yourself and pass its folder as data_dir"


def download(
    name: str,
    *,
    sha256: str,
    base_urls: Sequence[str],
    folder: Path,
    retries: int = 2,
    timeout_s: float = 30.0,
    progress: bool = True,
    at_most: int = MOST_NBYTES,
) -> Path:
    """Return the path of file `name` in `folder`; download it if it is missing.

    An existing file is used only if its checksum is right. A download is written under a temporary
    name, verified and then renamed, so that an interrupted download is never mistaken for the file.

    Args:
        name: file name, on the servers and in `folder`.
        sha256: checksum of the file, in hex.
        base_urls: URLs of servers, each ending in a slash, tried in this order.
        folder: cache folder; created if it does not exist.
        retries: number of further attempts at each server, after 1, 2, ... seconds.
        timeout_s: the longest time without data from a server.
        progress: show a progress bar on stderr.
        at_most: the largest number of bytes that is taken from a server.

    Raises:
        DataError: no server delivered the file, or the folder can't be written.
    """
    reasons = []
    for base_url in base_urls:
        found = _try_server(name, sha256, base_url, folder, retries, timeout_s, progress, at_most)
        if isinstance(found, Path):
            return found
        reasons.append(f"{base_url} ({found})")
    raise DataError(f"{name} could not be downloaded from {' or '.join(reasons)}: {ALTERNATIVE}")


def _try_server(
    name: str,
    sha256: str,
    base_url: str,
    folder: Path,
    retries: int,
    timeout_s: float,
    progress: bool,
    at_most: int,
) -> Path | str:
    """Return the file's path, or the reason why this server did not deliver it."""
    import pooch  # both here, because they are slow to import and rarely needed
    import requests

    try:
        store = pooch.create(
            path=folder,
            base_url=base_url,
            registry={name: f"sha256:{sha256}"},
            retry_if_failed=retries,
        )
        downloader = pooch.HTTPDownloader(
            progressbar=progress, timeout=timeout_s, chunk_size=CHUNK_NBYTES
        )
        return Path(store.fetch(name, downloader=_limited(downloader, at_most)))
    except _TooLongError:
        return f"it has more than {at_most:,} bytes"
    except requests.Timeout:
        return f"no data for {timeout_s:g} seconds"
    except requests.RequestException as error:
        if error.response is not None:
            return f"HTTP {error.response.status_code}"
        return f"incomplete download: {type(error).__name__}"
    except ValueError:
        return "the downloaded file does not have the published SHA-256 checksum"
    except OSError as error:
        raise DataError(
            f"{name} can't be saved in {folder} ({error.strerror or error}): make the folder "
            f"writable and free some space, or {ALTERNATIVE}"
        ) from None


class _TooLongError(Exception):
    """A server sends more than was asked for."""


class _LimitedFile:
    """A file that takes a limited number of bytes."""

    def __init__(self, file: BinaryIO, at_most: int) -> None:
        self._file = file
        self._left = at_most
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLongError
        return self._file.write(data)


def _limited(downloader: Callable[..., object], at_most: int) -> Callable[[str, str, Any], None]:
    """Return a downloader for pooch that gives up after `at_most` bytes."""

    def download_to(url: str, draft: str, store: Any) -> None:
        with open(draft, "wb") as file:  # pooch has made it, under a name of its own
            downloader(url, _LimitedFile(file, at_most), store)

    return download_to
