"""Sets of devices to try, and lanes that are late at random."""

import random
import time

from evenstep.engine import ThreadLanes


def shared(count):
    """CPU devices that share the parameters' memory."""
    return [f"cpu:{number}" for number in range(count)]


def own(count):
    """CPU devices with memory of their own, as GPUs have."""
    return [f"cpu:{number}:own" for number in range(count)]


def mixed(count):
    """One device with memory of its own, the others share theirs."""
    return ["cpu:0", "cpu:1:own", *(f"cpu:{number}" for number in range(2, count))]


TWO = shared(2)

LAYOUTS = {
    **{f"{count} shared": shared(count) for count in (1, 2, 3, 5)},
    **{f"{count} own": own(count) for count in (1, 2, 3, 5)},
    "3 mixed": mixed(3),
}


def delayed(model):
    """Have a model's forward pass begin up to 2 ms late: shards end in another order each time."""
    model.register_forward_pre_hook(lambda module, inputs: time.sleep(some_delay_s()))
    return model


def some_delay_s():
    """Return up to 2 ms, from the clock's last digits: a shard must not draw from `random`."""
    return time.perf_counter_ns() // 100 % 2000 * 1e-6


class DelayedLanes(ThreadLanes):
    """Lanes that start each task up to 2 ms late."""

    def put(self, lane, work):
        def late(lane):
            time.sleep(random.random() * 2e-3)
            work(lane)

        super().put(lane, late)
