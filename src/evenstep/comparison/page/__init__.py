"""The comparison of two runs as a page."""

from evenstep.comparison.page.html import page_of

__all__ = ["page_of"]
