"""Gluon: networks of blocks, their parameters, losses, data, and the trainer."""

from evenstep.mxnet.gluon import data, loss, nn, utils
from evenstep.mxnet.gluon.block import Block, HybridBlock, SymbolBlock
from evenstep.mxnet.gluon.parameter import Constant, Parameter, ParameterDict
from evenstep.mxnet.gluon.trainer import Trainer
from evenstep.mxnet.ops.names import lookup

__all__ = [
    "Block",
    "Constant",
    "HybridBlock",
    "Parameter",
    "ParameterDict",
    "SymbolBlock",
    "Trainer",
    "data",
    "loss",
    "nn",
    "utils",
]

__getattr__ = lookup("gluon", __all__, modules={"metric": "metric"})
