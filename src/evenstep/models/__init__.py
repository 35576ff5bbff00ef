"""Reference networks: plain `torch.nn` modules with torch's default initialisation."""

from evenstep.models.gpt import gpt
from evenstep.models.lenet import lenet
from evenstep.models.mlp import mlp
from evenstep.models.resnet import resnet18

__all__ = ["gpt", "lenet", "mlp", "resnet18"]
