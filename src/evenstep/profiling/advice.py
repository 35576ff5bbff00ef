"""In words: where the time of a trace went, and what would help.

The rules are those of somebody who looks at the picture of a trace: what takes the largest share
comes first, and a cause is named only where the trace shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypeAlias

from evenstep.profiling.accounting import DeviceShares, together, whole_percents
from evenstep.profiling.trace_reader import TraceAccount

WORTH_MENDING = 0.05
"""A loss that takes less of the devices' time is not worth a sentence."""
SHORT_SHARD_S = 1e-3
"""Where half of the shards are shorter than this, fixed costs weigh."""
UNEVEN = 1.2
"""A device is slow whose median shard takes so many times the fastest one's."""
STRAGGLING = 2.0
"""Shards vary where one in twenty takes so many times the median."""
OVERLAPPED = 0.1
"""Loading overlaps with steps where this share of it passes during steps."""
OFTEN_STOLEN = 0.1
"""The share of shards that has to be stolen before it says something."""

Cause: TypeAlias = Literal["data", "others", "sum", "update", "short", "stolen", "none", "gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence about a trace.

    Attributes:
        cause: what takes the time: "data", "others", "sum" or "update"; or a remark: "short"
            shards, "stolen" shards, "none" (nothing is lost), "gpu" (how to read the times).
        share: the share of the devices' time that it takes, 0 to 1; 0 for a remark.
        text: what it is, in numbers, and what would help.
    """

    cause: Cause
    share: float
    text: str


def findings(account: TraceAccount) -> list[Finding]:
    """Say where the time goes and what would help: losses first, the largest one first."""
    losses = [_data(account), _others(account), _sum(account), _update(account)]
    losses = [loss for loss in losses if loss.share >= WORTH_MENDING]
    losses.sort(key=lambda loss: -loss.share)
    remarks = [*_short(account)]
    if not losses and not remarks:
        remarks.append(_nothing(account))
    return [*losses, *remarks, *_stolen(account), *_gpu(account)]


# ---- losses


def _data(account: TraceAccount) -> Finding:
    share = together(account.devices).shares["wait_data"]
    wait_s = account.wait_data_s / account.steps
    head = f"{_who(account, 'wait')} for data {_percents(account)['wait_data']}% of the time"
    if not account.loads:
        advice = (
            f"{_ms(wait_s)} a step, and the trace does not show the loading. "
            f"--in-flight 2 lets the next batch come while devices work"
        )
        return Finding(cause="data", share=share, text=f"{head}: {advice}")
    load_s = account.load_s / account.loads
    text = f"{head}: {_loading(account, load_s)}"
    if wait_s > 1.5 * load_s:
        text += (
            f". Of {_ms(wait_s)} of waiting a step, loading explains only {_ms(load_s)}: the rest "
            f"passes in your program between the steps, or in bringing examples to the devices"
        )
    return Finding(cause="data", share=share, text=text)


def _loading(account: TraceAccount, load_s: float) -> str:
    work_s = (account.wall_s - account.wait_data_s) / account.steps
    overlaps = account.overlapped_load_s >= OVERLAPPED * account.load_s
    if load_s > work_s:
        longer = f"loading takes {_ms(load_s)} a step, longer than one step's work, {_ms(work_s)}"
        faster = "faster: more workers of the Loader, or less work for each example"
        if overlaps:
            return f"{longer}, although the two overlap. Loading must become {faster}"
        return (
            f"{longer}. --in-flight 2 overlaps them, but then loading sets the pace: "
            f"it must become {faster}"
        )
    both = f"loading takes {_ms(load_s)} a step and one step's work {_ms(work_s)}"
    if not overlaps:
        return f"{both}. --in-flight 2 overlaps them"
    if account.longest_load_s > work_s:
        longest = _ms(account.longest_load_s)
        return (
            f"{both}, and the two overlap, but the longest load took {longest}. "
            f"A greater --in-flight bridges such pauses"
        )
    return f"{both}, and the two overlap in part. A greater --in-flight may overlap more of it"


def _others(account: TraceAccount) -> Finding:
    waits_s = [
        device.wait_others_s - _waits_for_update_s(account, device) for device in account.devices
    ]
    share = sum(waits_s) / len(waits_s) / account.wall_s if account.wall_s else 0.0
    if len(account.devices) == 1:
        text = (
            f"{account.devices[0].device} stands idle {share:.0%} of the time inside steps: it "
            f"passes between the tasks. A larger --batch-size means fewer steps, fewer --shards "
            f"mean fewer tasks (both make another experiment)"
        )
    else:
        text = f"devices wait for each other {share:.0%} of the time: {_unevenness(account)}"
    return Finding(cause="others", share=share, text=text)


def _unevenness(account: TraceAccount) -> str:
    count, shards = len(account.devices), account.shards
    idle = [device.device for device in account.devices if not device.shards]
    if 0 < shards < count:
        return (
            f"a step has {_count(shards, 'shard')} for {count} devices, so that "
            f"{count - shards} of them can't have one. --shards {count} (another experiment) has "
            f"one for each; with fewer devices nothing is lost"
        )
    if shards and idle:
        return (
            f"{_list(idle)} computed no shard. Leave such devices out (--devices): "
            f"nothing is lost, as every device gets what its speed deserves"
        )
    paces = {} if _gpus(account) else account.shard_s  # on a GPU a shard's end is not awaited
    slow = max(paces, key=lambda device: paces[device], default="")
    fast = min(paces, key=lambda device: paces[device], default="")
    if paces and paces[slow] > UNEVEN * paces[fast]:
        return (
            f"{slow} takes {_ms(paces[slow])} a shard, {fast} {_ms(paces[fast])}. "
            f"More shards (--shards {2 * shards}, another experiment) are finer pieces to share "
            f"out; or leave {slow} out"
        )
    if shards % count:
        most = shards // count + 1
        return (
            f"{shards} shards over {count} devices give some {most} and others {most - 1}. "
            f"--shards {count * most} (another experiment) come out even"
        )
    median_s, late_s = account.median_shard_s, account.late_shard_s
    if paces and median_s and late_s and late_s >= STRAGGLING * median_s:
        return (
            f"no device is slower than the others, but shards vary: half of them take "
            f"{_ms(median_s)} or more, one in twenty {_ms(late_s)} or more. More shards "
            f"(--shards {2 * shards}, another experiment) are finer pieces to share out"
        )
    return (
        "the trace shows no device that is slower, so the time passes between the tasks. A larger "
        "--batch-size means fewer steps, fewer --shards mean fewer tasks (both make another "
        "experiment)"
    )


def _sum(account: TraceAccount) -> Finding:
    shards = f" (up to {account.shards - 1} sums a step)" if account.shards > 1 else ""
    text = (
        f"{_who(account, 'sum')} gradients {_percents(account)['sum']}% of the time{shards}: fewer "
        f"--shards sum less often, a larger --batch-size does more between the sums (both make "
        f"another experiment)"
    )
    return Finding(cause="sum", share=together(account.devices).shares["sum"], text=text)


def _update(account: TraceAccount) -> Finding:
    share = min(1.0, account.updating_s / account.wall_s) if account.wall_s else 0.0
    updaters = [device.device for device in account.devices if device.update_s]
    where = f", on {_list(updaters)}"
    where += " while the others wait" if len(updaters) < len(account.devices) else ""
    kernels = ""
    if any(device.startswith("cuda") for device in updaters):
        kernels = " (on a GPU it also waits there for the kernels of the shards)"
    text = (
        f"updating takes {share:.0%} of the time, {_ms(account.updating_s / account.steps)} a step"
        f"{where}{kernels}: a larger --batch-size updates less often, and an optimizer with "
        f"fused=True or foreach=True may be faster (both make another experiment)"
    )
    return Finding(cause="update", share=share, text=text)


def _waits_for_update_s(account: TraceAccount, device: DeviceShares) -> float:
    """Return for how long a device waited because another one was updating, at most."""
    return min(device.wait_others_s, max(0.0, account.updating_s - device.update_s))


# ---- remarks


def _short(account: TraceAccount) -> Iterable[Finding]:
    median_s = account.median_shard_s
    if median_s is not None and median_s < SHORT_SHARD_S and not _gpus(account):
        text = (
            f"half of the shards take less than {_ms(median_s)}: in so short a time the fixed cost "
            f"of each task and of each operation weighs. A larger --batch-size, or fewer --shards, "
            f"make longer ones (another experiment)"
        )
        yield Finding(cause="short", share=0.0, text=text)


def _nothing(account: TraceAccount) -> Finding:
    rest = f"no loss takes {WORTH_MENDING:.0%}, so nothing is worth mending"
    percent = _percents(account)["compute"]
    if percent > 100 * (1 - WORTH_MENDING):
        rest = "nothing is worth mending"
    text = f"{_who(account, 'compute')} {percent}% of the time: {rest}"
    return Finding(cause="none", share=0.0, text=text)


def _stolen(account: TraceAccount) -> Iterable[Finding]:
    whole = together(account.devices)
    if not whole.shards or whole.stolen / whole.shards < OFTEN_STOLEN:
        return
    thief = max(account.devices, key=lambda device: device.stolen)
    text = (
        f"{whole.stolen / whole.shards:.0%} of the shards were stolen, most of them by "
        f"{thief.device}: devices were not as fast as the steps before had promised. Other "
        f"programs on the same cores can be a reason; results don't change by it"
    )
    yield Finding(cause="stolen", share=0.0, text=text)


def _gpu(account: TraceAccount) -> Iterable[Finding]:
    gpus = _gpus(account)
    if gpus:
        text = (
            f"the times of {_list(gpus)} are those of the threads that launch kernels: what a GPU "
            f"still has to do when a shard is launched counts where it is waited for"
        )
        yield Finding(cause="gpu", share=0.0, text=text)


# ---- words


def _percents(account: TraceAccount) -> dict[str, int]:
    """Return the shares of all devices as the table shows them."""
    shares = together(account.devices).shares
    return dict(zip(shares, whole_percents(shares.values()), strict=True))


def _gpus(account: TraceAccount) -> list[str]:
    return [device.device for device in account.devices if device.device.startswith("cuda")]


def _who(account: TraceAccount, verb: str) -> str:
    if len(account.devices) > 1:
        return f"devices {verb}"
    return f"{account.devices[0].device} {verb}s"


def _list(names: list[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 1e-3 else 2}f} ms"
