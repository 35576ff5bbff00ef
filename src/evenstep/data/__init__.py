"""Data sets, loaders, and the order in which examples are visited."""

from evenstep.data.digits import digits
from evenstep.data.fashion_mnist import fashion_mnist
from evenstep.data.generators import GeneratorStates
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor, epoch_order

__all__ = ["Cursor", "GeneratorStates", "Loader", "digits", "epoch_order", "fashion_mnist"]
