"""Explains in sentences where the time of a trace went, and what would help.

The largest share comes first, and a cause is named only where the trace shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypeAlias

from evenstep.errors import counted
from evenstep.profiling.accounting import DeviceShares, together, whole_percents
from evenstep.profiling.reader import TraceAccount

WORTH_FIXING = 0.05
"""Smaller losses, as shares of the devices' time, get no sentence."""
SHORT_SHARD_S = 1e-3
"""If half of the shards are shorter than this, fixed costs matter."""
UNEVEN = 1.2
"""A device is slow if its median shard takes this many times as long as the fastest device's."""
STRAGGLING = 2.0
"""Shards vary if the 95th percentile of their time is this many times the median."""
OVERLAPPED = 0.1
"""Loading overlaps with steps if at least this share of it happens during steps."""
WORTH_CHANGING = 1.05
"""A different format of images is mentioned if its shards are this many times as fast."""
OFTEN_STOLEN = 0.1
"""Stolen shards are mentioned from this share on."""

_LESS_OVERHEAD = (
    "A larger batch means fewer steps, fewer shards mean fewer tasks (both make it a different "
    "experiment)"
)

Cause: TypeAlias = Literal[
    "data", "others", "sum", "update", "short", "format", "stolen", "none", "gpu"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence about a trace.

    Attributes:
        cause: a loss of time ("data", "others", "sum", "update") or a remark ("short" shards,
            a faster "format" of images, "stolen" shards, "none" for no loss, "gpu" on how to read
            the times).
        share: the share of the devices' time that is lost, 0 to 1; 0 for a remark.
        text: the loss in numbers, and what would help.
    """

    cause: Cause
    share: float
    text: str


def findings(account: TraceAccount) -> list[Finding]:
    """Return the losses of time, the largest first, and then remarks."""
    losses = [_data(account), _others(account), _sum(account), _update(account)]
    losses = [loss for loss in losses if loss.share >= WORTH_FIXING]
    losses.sort(key=lambda loss: -loss.share)
    remarks = [*_short(account), *_format(account)]
    if not losses and not remarks:
        remarks.append(_nothing(account))
    return [*losses, *remarks, *_stolen(account), *_gpu(account)]


# ---- losses


def _data(account: TraceAccount) -> Finding:
    wait_s = account.wait_data_s / account.steps
    text = f"{_who(account, 'wait')} for data {_percents(account)['wait_data']}% of the time: "
    if not account.loads:
        text += (
            f"{_ms(wait_s)} a step, and the trace does not show the loading. max_in_flight=2 loads "
            f"the next batch while devices compute"
        )
    else:
        load_s = account.load_s / account.loads
        text += _loading(account, load_s)
        if wait_s > 1.5 * load_s:
            text += (
                f". Of {_ms(wait_s)} of waiting a step, loading explains only {_ms(load_s)}: the "
                f"rest is spent in your program between the steps, or in copying examples to the "
                f"devices"
            )
    return Finding(cause="data", share=together(account.devices).shares["wait_data"], text=text)


def _loading(account: TraceAccount, load_s: float) -> str:
    work_s = (account.wall_s - account.wait_data_s) / account.steps
    overlaps = account.overlapped_load_s >= OVERLAPPED * account.load_s
    if load_s > work_s:
        longer = f"loading takes {_ms(load_s)} a step, longer than one step's work, {_ms(work_s)}"
        faster = "faster: more workers of the Loader, or less work for each example"
        if overlaps:
            return f"{longer}, although the two overlap. Loading must become {faster}"
        return (
            f"{longer}. max_in_flight=2 overlaps them, but then loading sets the pace: "
            f"it must become {faster}"
        )
    both = f"loading takes {_ms(load_s)} a step and one step's work {_ms(work_s)}"
    if not overlaps:
        return f"{both}. max_in_flight=2 overlaps them"
    if account.longest_load_s > work_s:
        longest = _ms(account.longest_load_s)
        return (
            f"{both}, and the two overlap, but the longest load took {longest}. "
            f"More steps in flight (max_in_flight=...) bridge such pauses"
        )
    return (
        f"{both}, and the two overlap in part. More steps in flight (max_in_flight=...) may "
        f"overlap more of it"
    )


def _others(account: TraceAccount) -> Finding:
    waits_s = [
        device.wait_others_s - _waits_for_update_s(account, device) for device in account.devices
    ]
    share = sum(waits_s) / len(waits_s) / account.wall_s if account.wall_s else 0.0
    if len(account.devices) == 1:
        text = (
            f"{account.devices[0].device} is idle {share:.0%} of the time inside steps, between "
            f"the tasks. {_LESS_OVERHEAD}"
        )
    else:
        text = f"devices wait for each other {share:.0%} of the time: {_unevenness(account)}"
    return Finding(cause="others", share=share, text=text)


def _waits_for_update_s(account: TraceAccount, device: DeviceShares) -> float:
    """Return an upper bound of the time that a device waited for another one's update."""
    return min(device.wait_others_s, max(0.0, account.updating_s - device.update_s))


def _unevenness(account: TraceAccount) -> str:
    if len(account.stage_s) > 1:
        return _pipeline(account)
    count, shards = len(account.devices), account.shards
    idle = [device.device for device in account.devices if not device.shards]
    finer = (
        f"More shards (shards={2 * shards}, a different experiment) are finer pieces to share out"
    )
    if 0 < shards < count:
        return (
            f"a step has {counted(shards, 'shard')} for {count} devices, so "
            f"{count - shards} of them can't have one. shards={count} (a different experiment) "
            f"gives each device one; with fewer devices nothing is lost"
        )
    if shards and idle:
        return (
            f"{_list(idle)} computed no shard. Leave such devices out (devices=...): nothing is "
            f"lost, because every device gets as many shards as its speed allows"
        )
    paces = {} if _gpus(account) else account.shard_s  # a GPU's tasks end before its kernels do
    slow = max(paces, key=lambda device: paces[device], default="")
    fast = min(paces, key=lambda device: paces[device], default="")
    if paces and paces[slow] > UNEVEN * paces[fast]:
        return (
            f"{slow} takes {_ms(paces[slow])} a shard, {fast} {_ms(paces[fast])}. {finer}; or "
            f"leave {slow} out"
        )
    if shards % count:
        most = shards // count + 1
        return (
            f"{shards} shards over {count} devices give some {most} and others {most - 1}. "
            f"shards={count * most} (a different experiment) come out even"
        )
    median_s, late_s = account.median_shard_s, account.late_shard_s
    if paces and median_s and late_s and late_s >= STRAGGLING * median_s:
        return (
            f"no device is slower than the others, but shards vary: half of them take "
            f"{_ms(median_s)} or more, one in twenty {_ms(late_s)} or more. {finer}"
        )
    return (
        f"no device is slower than the others, so the time is lost between tasks. {_LESS_OVERHEAD}"
    )


def _pipeline(account: TraceAccount) -> str:
    """Name the bubble of a network in stages, and its slow stage."""
    stages, times = len(account.stage_s), account.stage_s
    replicas = max(1, len(account.devices) // stages)
    shards = -(-account.shards // replicas)  # of the replica that has the most
    bubble = (stages - 1) / (shards + stages - 1)
    slow = max(times, key=lambda stage: times[stage])
    fast = min(times, key=lambda stage: times[stage])
    text = (
        f"while {stages} stages with {shards} shards fill and empty, equal stages are idle "
        f"{bubble:.0%} of the time (the bubble)"
    )
    if times[slow] > UNEVEN * times[fast]:
        return (
            f"{text}. Stage {slow} takes {_ms(times[slow])} a shard, stage {fast} "
            f"{_ms(times[fast])}, and the slowest sets the pace: move layers from stage {slow} to "
            f"stage {fast} (Stages(...)), or have the times balanced (Stages('balanced:time'))"
        )
    return (
        f"{text}. More shards (shards={2 * account.shards}, a different experiment) make it smaller"
    )


def _sum(account: TraceAccount) -> Finding:
    sums = f" (up to {account.shards - 1} sums a step)" if account.shards > 1 else ""
    text = (
        f"{_who(account, 'sum')} gradients {_percents(account)['sum']}% of the time{sums}: fewer "
        f"shards sum less often, a larger batch does more between the sums (both make "
        f"a different experiment)"
    )
    return Finding(cause="sum", share=together(account.devices).shares["sum"], text=text)


def _update(account: TraceAccount) -> Finding:
    share = min(1.0, account.updating_s / account.wall_s) if account.wall_s else 0.0
    updaters = [device.device for device in account.devices if device.update_s]
    where = f", on {_list(updaters)}"
    where += " while the others wait" if len(updaters) < len(account.devices) else ""
    if any(map(_is_gpu, updaters)):
        where += " (on a GPU, this includes waiting for the kernels of the shards)"
    text = (
        f"updating takes {share:.0%} of the time, {_ms(account.updating_s / account.steps)} a step"
        f"{where}: a larger batch updates less often, and an optimizer with fused=True or "
        f"foreach=True may be faster (both make it a different experiment)"
    )
    return Finding(cause="update", share=share, text=text)


# ---- remarks


def _short(account: TraceAccount) -> Iterable[Finding]:
    median_s = account.median_shard_s
    if median_s is not None and median_s < SHORT_SHARD_S and not _gpus(account):
        yield _remark(
            "short",
            f"half of the shards take less than {_ms(median_s)}, so the fixed cost of each task "
            f"and each operation matters. A larger batch, or fewer shards, make longer "
            f"shards (a different experiment); evenstep bench shards measures what V = "
            f"{account.shards} costs",
        )


def _format(account: TraceAccount) -> Iterable[Finding]:
    formats_ms = account.image_formats_ms
    if formats_ms and formats_ms["contiguous"] > WORTH_CHANGING * formats_ms["channels_last"]:
        usual_s, other_s = (1e-3 * formats_ms[one] for one in ("contiguous", "channels_last"))
        yield _remark(
            "format",
            f"channels-last images would be faster: a step over one shard took {_ms(other_s)} "
            f"instead of {_ms(usual_s)} when both were measured after the training. "
            f"memory_format='channels_last' (a different experiment) chooses them",
        )


def _nothing(account: TraceAccount) -> Finding:
    percent = _percents(account)["compute"]
    small = "" if percent > 100 * (1 - WORTH_FIXING) else f"no loss takes {WORTH_FIXING:.0%}, so "
    who = _who(account, "compute")
    return _remark("none", f"{who} {percent}% of the time: {small}nothing is worth fixing")


def _stolen(account: TraceAccount) -> Iterable[Finding]:
    whole = together(account.devices)
    if whole.shards and whole.stolen / whole.shards >= OFTEN_STOLEN:
        thief = max(account.devices, key=lambda device: device.stolen)
        yield _remark(
            "stolen",
            f"{whole.stolen / whole.shards:.0%} of the shards were stolen, most of them by "
            f"{thief.device}: the speeds of the devices changed after the shards were assigned. "
            f"Other programs on the same cores can be a reason; results do not change",
        )


def _gpu(account: TraceAccount) -> Iterable[Finding]:
    if gpus := _gpus(account):
        yield _remark(
            "gpu",
            f"the times of {_list(gpus)} were measured in the threads that launch kernels: a "
            f"kernel that outlasts its shard's task counts as part of the task that waits for it",
        )


# ---- words


def _remark(cause: Cause, text: str) -> Finding:
    return Finding(cause=cause, share=0.0, text=text)


def _percents(account: TraceAccount) -> dict[str, int]:
    """Return the shares of all devices together, as the table shows them."""
    shares = together(account.devices).shares
    return dict(zip(shares, whole_percents(shares.values()), strict=True))


def _gpus(account: TraceAccount) -> list[str]:
    return [device.device for device in account.devices if _is_gpu(device.device)]


def _is_gpu(device: str) -> bool:
    return not device.startswith("cpu")


def _who(account: TraceAccount, verb: str) -> str:
    if len(account.devices) > 1:
        return f"devices {verb}"
    return f"{account.devices[0].device} {verb}s"


def _list(names: list[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 1e-3 else 2}f} ms"
