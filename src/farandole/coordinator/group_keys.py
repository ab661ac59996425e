"""The key of each group of connections, made from the run's secret; see `collective/gloo.py` for what it is for.

It is put into a proposal as that is sent, and is nowhere else: not in the books, the journal or a log.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from farandole.membership import messages as m


def group_key(secret: str, run: str, group: int) -> bytes:
    """HMAC-SHA256 of the run and the group's number under the run's secret. Its holder learns nothing of the secret."""
    return hmac.new(secret.encode(), f"farandole group\n{run}\n{group}".encode(), hashlib.sha256).digest()


def keyed(message: m.Message, secret: str, run: str) -> m.Message:
    """What is sent for `message`: a proposal has its group's key in it."""
    if not isinstance(message, m.Propose):
        return message
    return msgspec.structs.replace(message, key=group_key(secret, run, message.view.group))
