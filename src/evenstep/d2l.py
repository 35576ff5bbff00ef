"""The names of Dive into Deep Learning's package: `evenstep.book.d2l`, where people look for it."""

from evenstep.book.d2l import *  # noqa: F403
from evenstep.book.d2l import __all__ as __all__
