"""Faults: how long a training waits for what is late, and how often it checks what it is given."""

from __future__ import annotations

import dataclasses
import math
import re

from evenstep.errors import InputError, shown
from evenstep.limits import MOST_SECONDS
from evenstep.options.checks import Options, check_flag, check_integer, check_seconds


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Faults(Options):
    """Limits on what is late, and checks of code, states and arithmetic.

    None of them has an effect on the result, except that `allow_rounding` accepts a different one.

    Attributes:
        lost_after_s: seconds that a device may spend on one shard while another device is idle.
            Then the device is given up, and the others compute its shards; but not before twenty
            times the slowest device's usual time for a shard.
        peer_timeout_s: with several processes, seconds to wait for another one; at most a year.
        allow_rounding: with several processes, train although their processors, libraries or
            settings round differently, which is refused otherwise. Results are then equal within
            rounding, not bit for bit: `Trainer.within_rounding` is true, and whenever states are
            compared, all processes copy that of the first one.
        check: when to check, on some of the shards, that the code keeps the contract of a step:
            "first", in the first step (also after a resume, or a change of the model's layers)
            and, in less time, in steps 2, 4, 8, 16 and so on; "every 100" steps; or "off". Several
            processes also compute one shard in common, and compare its bits. `Trainer.contract` has
            the report.
        check_every: with several processes, the interval in steps at which training states and
            the batches given to `step` are compared. States are also compared after the first
            step, by `save`, `evaluate` and `predict`, and at the end of the `with`.

    Raises:
        InputError: a value is of the wrong kind, or out of range.
    """

    lost_after_s: float = 60.0
    peer_timeout_s: float = 60.0
    allow_rounding: bool = False
    check: str = "first"
    check_every: int = 1000

    def __post_init__(self) -> None:
        check_seconds("lost_after_s", self.lost_after_s, at_most=math.inf)
        check_seconds("peer_timeout_s", self.peer_timeout_s, at_most=MOST_SECONDS)
        check_flag("allow_rounding", self.allow_rounding)
        check_integer("check_every", self.check_every, at_least=1, at_most=None)
        _ = self.check_interval

    @property
    def check_interval(self) -> float | None:
        """The steps between two checks of the code: infinite after the first; None for no check."""
        words = self.check.split() if isinstance(self.check, str) else []
        if words == ["off"]:
            return None
        if words == ["first"]:
            return math.inf
        match = re.fullmatch(r"every 0*([1-9][0-9]{0,17})", " ".join(words))
        if match is not None:
            return int(match[1])
        raise InputError(f'got check={shown(self.check)}: give "first", "off" or "every N"')
