"""What a dataset may be told by the loader that reads it, beside what any map-style dataset has; and who may stand
between a loader and those who ask it. All of it is optional.

    expect(samples, shuffled=...)  the order comes to these next, shape (n,), int64: have them near. Does not wait
    ahead(samples)                 these are read next, all of them: have them come at once, not one after the other
    settle(at_most_s)              wait until what is expected is near, as far as it will be; False: it takes longer

None of it changes what a sample is; that is for `set_epoch(epoch)` (`epochs.py`). torch's `Subset` is looked through,
as often as there is one in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

if TYPE_CHECKING:
    from farandole.data.loader import Loader
    from farandole.data.prefetch import Key

Samples = npt.NDArray[np.int64]


def hook(dataset: Any, name: str) -> Callable[..., Any] | None:
    """The dataset's method of that name; one that takes samples takes those of the dataset that is asked."""
    if type(dataset) is Subset:
        inner = hook(dataset.dataset, name)
        if inner is None or name == "settle":
            return inner
        indices = np.asarray(dataset.indices, dtype=np.int64)

        def through(samples: Samples, **options: Any) -> Any:
            return inner(indices[samples], **options)

        return through
    found = getattr(dataset, name, None)
    return found if callable(found) else None


class Watch(Protocol):
    """What stands between loaders and those who ask them, where something does: `farandole probe`."""

    def fetch(self, loader: Loader, key: Key, direct: Callable[[Key], Any]) -> Any: ...
