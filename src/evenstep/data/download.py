"""Download a published file once, and never take half of it for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep.errors import DataError

CHUNK_NBYTES = 1 << 16
WAY_OUT = "get the file another way and name its folder with --data-dir"


def download(
    name: str,
    *,
    sha256: str,
    base_urls: Sequence[str],
    folder: Path,
    retries: int = 2,
    timeout_s: float = 30.0,
    progress: bool = True,
) -> Path:
    """Return the path of file `name` in `folder`, downloaded there if it isn't yet.

    A file that is already there is used only if its checksum is right. A download is written
    under a temporary name, checked, and renamed: an interrupted one leaves nothing behind that
    could pass for the file.

    Args:
        name: file name, the same on the servers and in `folder`.
        sha256: checksum of the file, in hex.
        base_urls: servers, each ending in a slash, tried in turn.
        folder: cache folder; made if need be.
        retries: further tries at each server, after 1, 2, ... seconds.
        timeout_s: longest silence of a server.
        progress: show a bar on stderr.

    Raises:
        DataError: no server gave the file, or the folder can't be written.
    """
    reasons = []
    for base_url in base_urls:
        found = _try_server(name, sha256, base_url, folder, retries, timeout_s, progress)
        if isinstance(found, Path):
            return found
        reasons.append(f"{base_url} ({found})")
    raise DataError(f"{name} could not be downloaded from {' or '.join(reasons)}: {WAY_OUT}")


def _try_server(
    name: str,
    sha256: str,
    base_url: str,
    folder: Path,
    retries: int,
    timeout_s: float,
    progress: bool,
) -> Path | str:
    """Return the file's path, or the reason why this server didn't give it."""
    import pooch  # both here, because they are slow to import and seldom needed
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
        return Path(store.fetch(name, downloader=downloader))
    except requests.Timeout:
        return f"silent for {timeout_s:g} seconds"
    except requests.RequestException as error:
        if error.response is not None:
            return f"HTTP {error.response.status_code}"
        return f"no whole file came: {type(error).__name__}"
    except ValueError:
        return "the file that came has not the published SHA-256 checksum"
    except OSError as error:
        raise DataError(
            f"{name} can't be kept in {folder} ({error.strerror or error}): "
            f"make the folder writable with room in it, or {WAY_OUT}"
        ) from None
