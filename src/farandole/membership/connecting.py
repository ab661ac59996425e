"""The messages about the connections of a proposed view; what strangers in them bring about is in `strangers`."""

from __future__ import annotations

from farandole.membership.values import Count, Message, Name


class Publish(Message):
    """A rendezvous key of group `group`, to be handed to the other members of that group, or to one of them."""

    group: Count
    key: Name
    value: bytes
    to: Name = ""


class Prepared(Message):
    """This worker's connections for the proposed view stand."""

    view: Count


class Unproved(Message):
    """Of the connections for the proposed view, the one to `peer` leads to somebody at `address` who is not `peer`.

    `peer` is the worker itself if strangers keep it from listening at `address`.
    """

    view: Count
    peer: Name
    address: Name


class Published(Message):
    """A rendezvous key from another member of group `group`."""

    group: int
    key: str
    value: bytes
