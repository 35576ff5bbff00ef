"""Who may join a job: the handshake, tags, and strangers at every port that a job opens."""

import contextlib
import random
import re
import socket
import stat
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commands import MLP, complaint, trained
from evenstep.collectives import connect
from evenstep.distributed.secret import SealedStore, meeting_key, prove, read_secret
from evenstep.distributed.shared import memory as shared_memory
from evenstep.errors import InputError, PeerError
from job_processes import listening_at, trains
from launched import apart
from over_threads import on_each, on_each_of, peers_over

OURS, THEIRS = b"a secret of the job", b"a secret of a stranger"
FILE = "EVENSTEP_SECRET_FILE"


def met(job, secrets, meeting="1"):
    """Have processes with these secrets meet; return each one's key or error."""

    def meet(rank):
        own = dist.PrefixStore(meeting, job)
        try:
            return meeting_key(job, own, secrets[rank], rank, len(secrets), 20)
        except PeerError as error:
            return str(error)

    return on_each(range(len(secrets)), meet)


def test_each_meeting_has_a_key_that_follows_from_the_secret_alone():
    job = dist.HashStore()
    keys = [met(job, [OURS] * 3, meeting) for meeting in "ab"]
    assert [len({*one}) for one in keys] == [1, 1]
    assert keys[0][0] != keys[1][0]
    without = met(dist.HashStore(), [b""] * 2)
    assert without[0] == without[1] != met(dist.HashStore(), [b""] * 2)[0]


@pytest.mark.parametrize(
    ("own", "other", "says", "hears"),
    [
        (OURS, THEIRS, "has a different secret", "has a different secret"),
        (OURS, b"", "has no secret, and this process has one", "has a secret, and this process"),
        (OURS, OURS[:-1], "has a different secret", "has a different secret"),
    ],
    ids=["another", "none", "cut"],
)
@pytest.mark.parametrize("stranger", [0, 2])
def test_a_stranger_in_the_place_of_a_rank_is_named_and_told(own, other, says, hears, stranger):
    secrets = [other if rank == stranger else own for rank in range(3)]
    found = met(dist.HashStore(), secrets)
    for rank, error in enumerate(found):
        assert (hears if rank == stranger else says) in error
        assert (f"rank {stranger} (on {socket.gethostname()})" in error) == (rank != stranger)
        assert "--secret-file" in error


def test_a_stranger_who_comes_while_the_job_runs_is_told_at_once():
    job = dist.HashStore()
    (key, _) = met(job, [OURS] * 2)
    assert isinstance(key, bytes)
    late = dist.PrefixStore("2", job)
    with pytest.raises(PeerError, match="has a different secret"):
        meeting_key(job, late, THEIRS, 1, 2, timeout_s=3600)


def test_a_hello_of_another_meeting_gives_no_key():
    """A stranger who has seen everything and repeats it, but doesn't know the secret."""
    seen = dist.HashStore()
    old_key, _ = met(seen, [OURS] * 2)
    SealedStore(dist.PrefixStore("1", seen), old_key).set("machine/1", "proof")
    job = dist.HashStore()
    own = dist.PrefixStore("1", job)
    for name in ("hello/1", "machine/1"):
        job.set(f"1/{name}", dist.PrefixStore("1", seen).get(name))
    key = meeting_key(job, own, OURS, 0, 2, 20)
    assert key != old_key
    with pytest.raises(ValueError, match="no process of this job wrote"):
        SealedStore(own, key).get("machine/1")


@pytest.mark.parametrize("kind", ["flipped", "cut", "longer", "noise", "moved", "empty"])
def test_a_value_that_no_process_of_the_job_wrote_there_is_refused(kind):
    store, draws = dist.HashStore(), random.Random(kind)
    sealed = SealedStore(store, OURS)
    sealed.set("left/1", "its reason")
    whole = store.get("left/1")
    for number in range(len(whole)):
        flipped = bytearray(whole)
        flipped[number] ^= 1 << draws.randrange(7)
        forged = {
            "flipped": bytes(flipped),
            "cut": whole[:number],
            "longer": whole + bytes(draws.choices(b"x ", k=1 + number**3 % 100_000)),
            "noise": bytes(draws.choices(range(1, 128), k=number)),
            "moved": whole,
            "empty": b"",
        }[kind]
        name = "left/2" if kind == "moved" else "left/1"
        store.set(name, forged.decode())
        with pytest.raises(ValueError, match="no process of this job"):
            SealedStore(store, OURS).get(name)


def test_an_older_value_is_refused_after_a_newer_one():
    store = dist.HashStore()
    writer, reader = SealedStore(store, OURS), SealedStore(store, OURS)
    writer.set("doing/1", "first")
    old = store.get("doing/1").decode()
    assert reader.get("doing/1") == b"first"
    writer.set("doing/1", "second")
    assert [reader.get("doing/1"), reader.get("doing/1")] == [b"second"] * 2
    store.set("doing/1", old)
    with pytest.raises(ValueError, match="older value"):
        reader.get("doing/1")


@pytest.mark.parametrize("stranger", [None, 0, 1])
def test_who_has_a_connection_proves_the_key(stranger):
    def ended(end):
        try:
            prove(end, THEIRS if end.rank == stranger else OURS)
        except PeerError as error:
            return str(error)
        return ""

    for rank, error in enumerate(on_each_of(3, ended)):
        if stranger is None:
            assert error == ""
        elif rank != stranger:
            assert error.startswith(f"rank {stranger} is refused")
        else:
            assert "is refused" in error


def test_a_proof_can_not_be_sent_back():
    """Whoever returns what it was sent proves nothing."""

    def ended(end):
        if end.rank == 1:
            tag = torch.zeros(32, dtype=torch.uint8)
            end.receive(tag, 0).wait()
            end.send(tag, 0).wait()
        else:
            with pytest.raises(PeerError, match="rank 1 is refused"):
                prove(end, OURS)

    on_each_of(2, ended)


@pytest.mark.parametrize("said", ["nothing", "noise", "half", "more", "repeated"])
def test_strangers_at_the_socket_get_no_memory_and_keep_nobody(monkeypatch, said):
    """They know its name, which `/proc/net/unix` shows to everybody, and come before the others."""
    strangers, greetings = [], []
    listen, connect_to = shared_memory.listening, shared_memory.connected
    draws = random.Random(said)

    def come(name):
        words = {"noise": draws.randbytes(32), "half": draws.randbytes(16)}
        words |= {"nothing": b"", "more": draws.randbytes(50_000)}
        words["repeated"] = greetings[-1] if greetings else b""
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(f"\0{name}")
        stranger.sendall(words[said])
        strangers.append(stranger)

    class Surrounded:
        def __enter__(self):
            self._listening = listen()
            name, made = self._listening.__enter__()
            for _ in range(0 if said == "repeated" else 50):
                come(name)
            return name, made

        def __exit__(self, *error):
            return self._listening.__exit__(*error)

    class Heard:
        def __init__(self, name, greeting=b""):
            self._name, self._connected = name, connect_to(name, greeting)
            self._greeting = greeting

        def __enter__(self):
            link = self._connected.__enter__()
            greetings.append(self._greeting)  # was sent: earlier, no stranger can know it
            if said == "repeated":
                come(self._name)
            return link

        def __exit__(self, *error):
            return self._connected.__exit__(*error)

    monkeypatch.setattr(shared_memory, "listening", Surrounded)
    monkeypatch.setattr(shared_memory, "connected", Heard)
    found = on_each(connect(3), lambda end: shared_memory.shared_bytes(peers_over(end), 1000))
    assert None not in found
    assert len(strangers) >= 2
    for stranger in strangers:
        with stranger:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionError):  # closed, and what it has said is unread
                assert socket.recv_fds(stranger, 1, 1)[1] == []


def test_memory_of_a_stranger_is_not_taken(monkeypatch):
    """Whoever answers must prove that it knows what only the processes of the job know."""

    def answer(offered, handle, key, missing):
        link, _ = offered.accept()
        with link:
            socket.send_fds(link, [b"x" * 32], [handle])
        return True

    monkeypatch.setattr(shared_memory, "_send_to_each", answer)
    found = on_each(connect(2), lambda end: shared_memory.shared_bytes(peers_over(end), 1000))
    assert found == [None, None]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "has 0 bytes"), (b" short \n", "has 5 bytes"), (b"x" * 5000, "can't be read")],
    ids=["empty", "short", "long"],
)
def test_a_secret_that_could_be_guessed_is_refused(tmp_path, content, says):
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_secret(file)
    assert says in complaint("train", *MLP, "--secret-file", file, code=2)


def test_a_newline_is_not_of_the_secret(tmp_path):
    (tmp_path / "secret").write_bytes(OURS + b"\n")
    assert read_secret(tmp_path / "secret") == OURS
    with pytest.raises(InputError, match="can't be read"):
        read_secret(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stranger", [0, 1])
def test_a_job_with_a_stranger_does_not_start(tmp_path, stranger):
    for name, secret in (("ours", OURS), ("theirs", THEIRS)):
        (tmp_path / name).write_bytes(secret)
    variables = [{FILE: str(tmp_path / "ours")}] * 3
    variables[stranger] = {FILE: str(tmp_path / "theirs")}
    train = ("train", *MLP, "--steps", 5, "--devices", 1)
    ended = apart("command.py", *train, variables=variables, within=[()] * 3)
    for rank, (code, output, errors) in enumerate(ended):
        assert code == 1
        assert "fingerprint" not in output
        (line,) = [line for line in errors.splitlines() if line.startswith("evenstep: ")]
        assert "has a different secret than this process" in line
        assert (f"rank {stranger} " in line) == (rank != stranger)


# What a stranger may say to a TCP port: noise, the first words of torch's store (its magic number,
# then a request that is cut or promises too much) and of gloo (the number of a connection).
MAGIC = b"\0" + struct.pack("<I", 0x3C85F7CE)
SAYINGS = [
    lambda draws: draws.randbytes(draws.choice([1, 7, 8, 64, 4096])),
    lambda draws: draws.randbytes(1 << 20),
    lambda draws: b"",
    lambda draws: struct.pack("<q", draws.randrange(8)) + draws.randbytes(draws.choice([0, 64])),
    lambda draws: MAGIC + b"\1" + struct.pack("<Q", 5) + b"ab",
    lambda draws: MAGIC + b"\1" + struct.pack("<Q", 1 << 40) + b"ab",
    lambda draws: MAGIC + bytes([draws.randrange(20)]) + draws.randbytes(100),
    lambda draws: b"GET / HTTP/1.0\r\n\r\n",
]


def disturb(port, draws, held, times):
    """Connect again and again, say something, and leave or stay."""
    for _ in range(times):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        stranger.settimeout(0.05)
        said = draws.choice(SAYINGS)(draws)
        try:
            for _ in range(draws.choice([1, 1, 3])):  # the same again, in one connection
                stranger.sendall(said)
            stranger.recv(100)
        except OSError:
            pass
        held.append(stranger)
        if draws.random() < 0.7:
            held.pop().close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_strangers_at_every_port_change_nothing(seed):
    """On one machine a job has one TCP port, that of torch's store: memory is shared."""
    steps, held, draws = 600, [], random.Random(seed)
    with trains(*MLP, "--steps", steps, "--processes", 2) as (launcher, workers):
        ports = [[port for _, port in listening_at(pid)] for pid in (launcher.pid, *workers)]
        assert [len(own) for own in ports] == [1, 0, 0]
        assert "@evenstep" not in Path("/proc/net/unix").read_text()
        disturb(*ports[0], draws, held, times=60)
        assert launcher.poll() is None  # it was disturbed during its steps
        output, errors = launcher.communicate(timeout=200)
    for stranger in held:
        stranger.close()
    assert launcher.returncode == 0, errors
    found = re.search(r"^fingerprint +(\w{64})$", output, re.MULTILINE)[1]
    assert found == trained(*MLP, "--steps", steps).fingerprint


@pytest.mark.slow
def test_the_random_secret_of_a_launcher_is_seen_by_nobody_else():
    def variables_of(pid):
        return Path(f"/proc/{pid}/environ").read_text().split("\0")

    with trains(*MLP, "--steps", 10**6, "--processes", 2) as (launcher, workers):
        (file,) = {
            Path(one.partition("=")[2])
            for pid in workers
            for one in variables_of(pid)
            if one.startswith(FILE)
        }
        secret = read_secret(file).decode()
        assert len(secret) == 64
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        for pid in (launcher.pid, *workers):
            shown = Path(f"/proc/{pid}/cmdline").read_text() + "".join(variables_of(pid))
            assert secret not in shown
    assert not file.exists()
