"""Train one PyTorch model on every device: the same weights, bit for bit, on any number of them."""

from evenstep import data, errors, metrics, models
from evenstep.devices import Device, find_devices, try_all_gpus, try_gpu
from evenstep.engine import Engine
from evenstep.exporting import Exported, export, load_exported
from evenstep.hybrid import Hybrid, hybridize
from evenstep.programs import Hybridized
from evenstep.rates import scale_lr
from evenstep.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Engine",
    "Exported",
    "Hybrid",
    "Hybridized",
    "Trainer",
    "data",
    "errors",
    "export",
    "find_devices",
    "hybridize",
    "load_exported",
    "metrics",
    "models",
    "scale_lr",
    "try_all_gpus",
    "try_gpu",
]
