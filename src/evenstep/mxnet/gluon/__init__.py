"""Gluon: networks of blocks, their parameters, losses, data, and the trainer."""

from evenstep.mxnet.gluon import data, loss, nn, utils
from evenstep.mxnet.gluon.block import Block, HybridBlock
from evenstep.mxnet.gluon.parameter import Constant, Parameter, ParameterDict
from evenstep.mxnet.gluon.trainer import Trainer

__all__ = [
    "Block",
    "Constant",
    "HybridBlock",
    "Parameter",
    "ParameterDict",
    "Trainer",
    "data",
    "loss",
    "nn",
    "utils",
]
