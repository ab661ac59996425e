"""Tables of a page that are written from results: what is between `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BLOCK = re.compile(r"<!-- ([a-z ]+) -->\n.*?\n?<!-- end -->", re.DOTALL)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return the text of a page with these tables, by the names that are in it."""
    return _BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{tables[found[1]]}\n<!-- end -->", text)
