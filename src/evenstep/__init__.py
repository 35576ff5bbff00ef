"""Train one PyTorch model on every device: the same weights, bit for bit, on any number of them."""

from evenstep import callbacks, data, errors, metrics, models
from evenstep.batch import Shards, shared
from evenstep.devices import Device, find_devices, try_all_gpus, try_gpu
from evenstep.engine import Engine
from evenstep.experiment import Experiment
from evenstep.inference.export import Exported, export, load_exported
from evenstep.inference.fast_call import Hybrid, hybridize
from evenstep.lr_scaling import scale_lr
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
    "Hybrid",
    "Hybridized",
    "Shards",
    "Trainer",
    "all_gather",
    "callbacks",
    "data",
    "errors",
    "export",
    "find_devices",
    "hybridize",
    "load_exported",
    "metrics",
    "models",
    "scale_lr",
    "shared",
    "try_all_gpus",
    "try_gpu",
    "verify",
]


def __dir__() -> list[str]:
    """Return the public names: the packages inside are not among them."""
    return sorted([*__all__, "__version__"])
