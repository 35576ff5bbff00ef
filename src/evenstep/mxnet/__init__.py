"""The names of MXNet over torch and the engine: code of the book's MXNet editions runs again."""

from evenstep.errors import MXNetError
from evenstep.mxnet import autograd, gluon, init, metric, nd, np, npx, optimizer, random, sym
from evenstep.mxnet.core.context import Context, cpu, current_context, gpu, num_gpus
from evenstep.mxnet.core.operand import operation
from evenstep.mxnet.core.runtime import close, waitall
from evenstep.mxnet.ops.names import lookup

__all__ = [
    "Context",
    "MXNetError",
    "autograd",
    "close",
    "cpu",
    "current_context",
    "gluon",
    "gpu",
    "init",
    "metric",
    "nd",
    "np",
    "npx",
    "num_gpus",
    "operation",
    "optimizer",
    "random",
    "sym",
    "waitall",
]

__getattr__ = lookup(
    "",
    __all__,
    modules={"ndarray": "nd", "symbol": "sym", "initializer": "init", "context": "core.context"},
)
