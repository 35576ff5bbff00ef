"""Closed formulas: what no layout exceeds. The simulation is tested against them."""

from __future__ import annotations

import math


def most_speed_up(shards: int, devices: int) -> float:
    """Return V / ceil(V / D): the most that D equal devices gain with V equal shards."""
    return shards / math.ceil(shards / devices)


def ring_nbytes(nbytes: float, processes: int) -> float:
    """Return what each process sends in a ring all-reduce, and in evenstep's canonical sum.

    It is 2 n (p - 1) / p (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
    Clusters of Workstations", 2009).
    """
    return 2 * nbytes * (processes - 1) / processes


def bubble(shards: int, stages: int) -> float:
    """Return the idle share (S - 1) / (V + S - 1) of a pipeline of equal stages.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    2019, arXiv:1811.06965.
    """
    return (stages - 1) / (shards + stages - 1)


def most_sliced(share: float, slices: int, devices: int) -> float:
    """Return the most that D equal devices gain with S equal slices of each layer.

    A part of the time, `share`, is in slices, of which a device computes ceil(S / D). The rest is
    computed by one device (Amdahl, "Validity of the Single Processor Approach to Achieving Large
    Scale Computing Capabilities", 1967).
    """
    return 1 / (1 - share + share * math.ceil(slices / devices) / slices)


def partial_sums(first: int, end: int, shards: int) -> int:
    """Return how many partial sums a process with shards [first, end) of V sends.

    They are the highest nodes of the tree inside its run: node [lo, hi) splits at lo + the largest
    power of two below hi - lo.
    """

    def count(lo: int, hi: int) -> int:
        if end <= lo or hi <= first:
            return 0
        if first <= lo and hi <= end:
            return 1
        middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
        return count(lo, middle) + count(middle, hi)

    return count(0, shards)


def best_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return how often to save, in seconds of training: sqrt(2 C M).

    Young, "A First Order Approximation to the Optimum Checkpoint Interval", 1974.
    """
    return math.sqrt(2 * save_s * between_failures_s)


def useful_share(
    interval_s: float, save_s: float, restart_s: float, between_failures_s: float
) -> float:
    """Return the share of the time that trains, where failures come at random.

    Each interval costs a save; each failure costs a restart, and on average half of an interval
    that must be computed again.

    Args:
        interval_s: seconds of training between two checkpoints.
        save_s: seconds in which a checkpoint stops the training.
        restart_s: seconds from a failure until training goes on.
        between_failures_s: the mean time between failures of all machines together.
    """
    saving = interval_s / (interval_s + save_s)
    lost_s = restart_s + (interval_s + save_s) / 2
    return saving * max(0.0, 1 - lost_s / between_failures_s)
