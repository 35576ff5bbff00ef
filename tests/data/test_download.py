"""Downloads from a server on this machine that answers by a script."""

import gc
import hashlib
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evenstep.data.download import download
from evenstep.errors import DataError

NAME = "data.gz"
BODY = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()

GOOD = (200, BODY, len(BODY))
OTHER = (200, b"other", 5)
HALF = (200, BODY[: len(BODY) // 2], len(BODY))  # promises the whole, and hangs up
BUSY = (503, b"", 0)


class Server(ThreadingHTTPServer):
    """Gives the answers of `script` in turn, the last one from then on."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = [GOOD]
        self.requests = 0
        self.after_body = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        script = self.server.script
        status, body, length = script[min(self.server.requests, len(script) - 1)]
        self.server.requests += 1
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.server.after_body()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def get(tmp_path):
    """Download into `folder`, without retries and without a bar by default."""

    def get(*base_urls, **options):
        options = {"retries": 0, "progress": False, "timeout_s": 5.0, **options}
        folder = tmp_path / "cache" / "set"
        return download(NAME, sha256=SHA256, base_urls=base_urls, folder=folder, **options)

    get.folder = tmp_path / "cache" / "set"
    return get


def refused(get, *base_urls, **options) -> str:
    with pytest.raises(DataError, match="data_dir") as caught:
        get(*base_urls, **options)
    assert "\n" not in str(caught.value)
    assert list(get.folder.iterdir()) == []
    return str(caught.value)


def closed_port() -> str:
    with Server() as server:
        return server.url


def test_a_good_file_is_downloaded_once(server, get):
    path = get(server.url)
    assert path == get.folder / NAME
    assert path.read_bytes() == BODY
    assert get(server.url) == path
    assert server.requests == 1


def test_a_good_file_in_the_cache_needs_no_server(server, get):
    path = get(server.url)
    assert get(closed_port()) == path


def test_another_file_is_refused(server, get):
    server.script = [OTHER]
    message = refused(get, server.url)
    assert NAME in message
    assert "checksum" in message


def test_half_a_file_is_refused(server, get):
    server.script = [HALF]
    assert "incomplete download" in refused(get, server.url)


def test_a_busy_server_is_tried_again(server, get):
    server.script = [BUSY, GOOD]
    assert get(server.url, retries=1).read_bytes() == BODY
    assert server.requests == 2


def test_a_server_error_is_named(server, get):
    server.script = [BUSY]
    assert f"{server.url} (HTTP 503)" in refused(get, server.url)


def test_a_server_that_can_t_be_reached_is_named(server, get):
    url = closed_port()
    assert f"{url} (incomplete download: ConnectionError)" in refused(get, url)


def test_a_silent_server_times_out(server, get):
    answered = threading.Event()
    server.script = [(200, b"", len(BODY))]
    server.after_body = lambda: answered.wait(5)
    try:
        assert server.url in refused(get, server.url, timeout_s=0.2)
    finally:
        answered.set()


def test_the_next_server_is_tried_in_turn(server, get):
    assert get(closed_port(), server.url).read_bytes() == BODY


def test_every_server_that_failed_is_named(server, get):
    server.script = [BUSY]
    url = closed_port()
    message = refused(get, url, server.url)
    assert message.index(url) < message.index(server.url)


def test_half_a_file_in_the_cache_is_replaced(server, get):
    get.folder.mkdir(parents=True)
    (get.folder / NAME).write_bytes(BODY[:1000])
    assert get(server.url).read_bytes() == BODY


def test_half_a_file_in_the_cache_is_never_taken_as_good(server, get):
    get.folder.mkdir(parents=True)
    (get.folder / NAME).write_bytes(BODY[:1000])
    with pytest.raises(DataError):
        get(closed_port())


@pytest.fixture
def _no_garbage_collection():
    """Python drops a Ctrl-C that comes while it runs a callback of its garbage collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_an_interrupted_download_leaves_nothing_behind(server, get):
    main = threading.main_thread().ident
    stopped = threading.Event()

    def interrupt():
        signal.pthread_kill(main, signal.SIGINT)
        stopped.wait(5)

    server.script = [HALF, GOOD]
    server.after_body = interrupt
    with pytest.raises(KeyboardInterrupt):
        get(server.url)
    stopped.set()
    assert list(get.folder.iterdir()) == []
    server.after_body = lambda: None
    assert get(server.url).read_bytes() == BODY


def test_a_folder_that_can_t_be_made_is_named(server, get):
    get.folder.parent.write_text("a file where the cache folder should be")
    with pytest.raises(DataError, match=r"can't be saved in .*cache.*data_dir"):
        get(server.url)


def test_a_progress_bar_is_shown_on_stderr(server, get, capsys):
    get(server.url, progress=True)
    assert "100%" in capsys.readouterr().err


def test_a_download_without_end_is_given_up(server, get):
    """A server, or somebody on the way to it, could fill the disk before the checksum is known."""
    server.script = [(200, bytes(10_000_000), 1 << 40)]
    line = refused(get, server.url, at_most=1_000_000)
    assert "it has more than 1,000,000 bytes" in line
    assert server.requests == 1


def test_a_download_of_as_many_bytes_as_may_be_is_taken(server, get):
    assert get(server.url, at_most=len(BODY)).read_bytes() == BODY
