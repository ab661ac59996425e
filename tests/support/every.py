"""One test that looks at many files. A test for each would cost more time than it spends on looking."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def every(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a test of a look at one file: all of `paths` are looked at, and all that is wrong is told."""
    found = list(paths)

    def of(look: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong: list[str] = []
            for path in found:
                try:
                    look(path)
                except AssertionError as error:
                    wrong.append(f"{path}: {error}")
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = look.__name__, look.__doc__
        return test

    return of
