"""Templates of HTML pages: what is put into them is escaped, and nothing may be missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2


def template(file: Path, **filters: Callable[..., Any]) -> jinja2.Template:
    """Return the template in a file, with filters of its own."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(filters)
    return environment.get_template(file.name)
