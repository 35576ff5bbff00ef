"""Train one PyTorch model on every device: the same weights, bit for bit, on any number of them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep import callbacks, data, errors, metrics, models, nn
    from evenstep.arithmetic import portable
    from evenstep.batch import Shards, shared
    from evenstep.callbacks.lr_scaling import scale_lr
    from evenstep.comparison import compare
    from evenstep.devices import Device, find_devices, try_all_gpus, try_gpu
    from evenstep.engine import Engine
    from evenstep.inference.export import Exported, export, load_exported
    from evenstep.inference.fast_call import Hybrid, hybridize
    from evenstep.options import Experiment, Faults, Layout, Owners, Slices, Stages
    from evenstep.planning.plan import plan
    from evenstep.recording import record
    from evenstep.shard.compile_policy import Hybridized
    from evenstep.shard.lockstep import all_gather
    from evenstep.training.trainer import Trainer
    from evenstep.verification import verify

__version__ = "0.2.0"

__all__ = [
    "Device",
    "Engine",
    "Experiment",
    "Exported",
    "Faults",
    "Hybrid",
    "Hybridized",
    "Layout",
    "Owners",
    "Shards",
    "Slices",
    "Stages",
    "Trainer",
    "all_gather",
    "callbacks",
    "compare",
    "data",
    "errors",
    "export",
    "find_devices",
    "hybridize",
    "load_exported",
    "metrics",
    "models",
    "nn",
    "plan",
    "portable",
    "record",
    "scale_lr",
    "shared",
    "try_all_gpus",
    "try_gpu",
    "verify",
]

# What `TYPE_CHECKING` imports from modules, by name; the other names in `__all__` are packages.
_DEFINED_IN = {
    "Device": "evenstep.devices",
    "Engine": "evenstep.engine",
    "Experiment": "evenstep.options",
    "Exported": "evenstep.inference.export",
    "Faults": "evenstep.options",
    "Hybrid": "evenstep.inference.fast_call",
    "Hybridized": "evenstep.shard.compile_policy",
    "Layout": "evenstep.options",
    "Owners": "evenstep.options",
    "Shards": "evenstep.batch",
    "Slices": "evenstep.options",
    "Stages": "evenstep.options",
    "Trainer": "evenstep.training.trainer",
    "all_gather": "evenstep.shard.lockstep",
    "compare": "evenstep.comparison",
    "export": "evenstep.inference.export",
    "find_devices": "evenstep.devices",
    "hybridize": "evenstep.inference.fast_call",
    "load_exported": "evenstep.inference.export",
    "plan": "evenstep.planning.plan",
    "portable": "evenstep.arithmetic",
    "record": "evenstep.recording",
    "scale_lr": "evenstep.callbacks.lr_scaling",
    "shared": "evenstep.batch",
    "try_all_gpus": "evenstep.devices",
    "try_gpu": "evenstep.devices",
    "verify": "evenstep.verification",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562): torch takes seconds to import."""
        if name not in __all__:
            raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
        if name in _DEFINED_IN:
            found = getattr(import_module(_DEFINED_IN[name]), name)
        else:
            found = import_module(f"evenstep.{name}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return the public names: the packages inside are not among them."""
    return sorted([*__all__, "__version__"])
