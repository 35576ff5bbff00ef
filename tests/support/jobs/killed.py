"""Two processes that share memory, killed at each of their exchanges in turn.

python tests/support/jobs/killed.py one|all
"""

import datetime
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from evenstep.distributed import Peers, StatusBoard, shared_bytes
from evenstep.distributed.gloo import GlooTransport
from evenstep.errors import PeerError

NBYTES = 1 << 20


def share(rank, file, kill_at):
    """Share memory with the other process; be killed at exchange number `kill_at`."""
    store = dist.FileStore(file, 2)
    store.set_timeout(datetime.timedelta(seconds=20))
    peers = Peers(
        GlooTransport(store, rank, 2, "lo", 20),
        ["here"] * 2,
        StatusBoard(dist.HashStore(), rank),
        on_one_machine=True,
    )
    gather, calls = peers.gather, []

    def killed(message, exchange):
        calls.append(exchange)
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(message, exchange)

    peers.gather = killed
    assert shared_bytes(peers, NBYTES) is not None


def start(rank, file, kill_at):
    child = os.fork()
    if child:
        return child
    try:
        share(rank, file, kill_at)
        os._exit(0)
    except PeerError:
        os._exit(1)


def main():
    """Kill one process or both at exchange 1, 2, ...; print the numbers at which that happened."""
    kills_both = sys.argv[1] == "all"
    for kill_at in range(1, 100):
        with tempfile.TemporaryDirectory() as folder:
            limits = [kill_at, kill_at if kills_both else None]
            children = [start(rank, f"{folder}/store", limits[rank]) for rank in range(2)]
            codes = [os.waitpid(child, 0)[1] for child in children]
        if codes == [0, 0]:
            return
        print(kill_at)
        assert any(os.WIFSIGNALED(code) for code in codes)  # the first may find the second dead


if __name__ == "__main__":
    main()
