"""Reading from places that somebody else keeps: one kind of error, and no trace in what a sample draws.

A client of a remote store draws from Python's global generator when it retries, which would show in what a sample's
augmentation draws after it: its state is put back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator

from farandole.errors import FarandoleError, ShardError


@contextlib.contextmanager
def reading(url: str) -> Generator[None, None, None]:
    """Around all that asks the store of `url` for anything. Raises `ShardError` for whatever goes wrong there."""
    drawn = random.getstate()
    try:
        yield
    except (FarandoleError, MemoryError):
        raise
    except FileNotFoundError:
        raise ShardError(f"{url} is not there; name a file, or a folder of such files") from None
    except Exception as error:
        raise ShardError(
            f"{url} can't be read ({type(error).__name__}: {error}); see that it is whole and can be reached from here"
        ) from error
    finally:
        random.setstate(drawn)
