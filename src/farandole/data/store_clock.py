"""Lets a dataset of your own report to `farandole probe` how long it waits for a store.

```python
def __getitem__(self, index):
    with store_clock.reading():  # this machine's copy
        if index not in self.copies:
            with store_clock.fetching(), store_clock.request(self.url) as request:
                self.copies[index] = self.download(index)
                request.bytes = len(self.copies[index])
    ...
```
"""

from farandole.data.object_store import fetching as fetching
from farandole.data.object_store import request as request
from farandole.data.object_store import time_reading as reading

__all__ = ["fetching", "reading", "request"]
