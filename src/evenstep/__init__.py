"""Train one PyTorch model on every device: the same weights, bit for bit, on any number of them."""

from evenstep import data, errors, metrics, models
from evenstep.devices import Device, find_devices, try_all_gpus, try_gpu
from evenstep.engine import Engine
from evenstep.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Engine",
    "Trainer",
    "data",
    "errors",
    "find_devices",
    "metrics",
    "models",
    "try_all_gpus",
    "try_gpu",
]
