"""The names of Dive into Deep Learning's package, as defined in `evenstep.book.d2l`."""

from evenstep.book.d2l import *  # noqa: F403
from evenstep.book.d2l import __all__ as __all__
