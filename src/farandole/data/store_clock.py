"""Where a data set of your own waits for its store, for `farandole probe`. See docs/data.md."""

from farandole.data.object_store import fetching as fetching
from farandole.data.object_store import request as request
from farandole.data.object_store import time_reading as reading

__all__ = ["fetching", "reading", "request"]
