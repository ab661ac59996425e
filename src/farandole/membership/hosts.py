"""What a pool and the agents of its hosts say to each other, through the coordinator, which passes it on unread.

An agent is the process of a host that starts that host's workers (`pool/agent.py`). Both sides say how things
are, not what has changed: an `Order` names all that is to run, a `Report` all that runs and all that has ended. So what
is lost with a connection, or comes twice, does no harm; who is connected anew says everything again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.membership.values import Count, Message, Name, Seconds, Text

MOST = 10_000  # workers that one host may have had
CHUNK_BYTES = 64 * 1024  # of a log, in one message

Ids = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST)]
Ends = Annotated[dict[Name, Text], msgspec.Meta(max_length=MOST)]
Words = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST)]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a host do, the same for all hosts of a run.

    `pack`: the hash of the run's code (see `code/pack.py`), of which `script` is a file; "" where the host has it, in
    `folder`. `setup` and `prepare`: commands that must succeed first. `orphan_s`: without a coordinator
    and without workers an agent ends after so long.
    """

    script: Text
    arguments: Words = ()
    folder: Text = ""
    pack: Name = ""
    setup: Text = ""
    prepare: Text = ""
    threads: Count = 1
    orphan_s: Seconds = 600.0


class Notified(msgspec.Struct, frozen=True, kw_only=True):
    """A host will go `at` that Unix time; or may, where `advice`."""

    at: Seconds
    reason: Text
    advice: bool = False


class Order(Message):
    """To an agent: these `workers` are to run, and nobody else. What has ended stays ended: ids are never used twice.

    `instance`: the agent's process that it is for; another one's workers are others. `heard`: whose end is known, and
    need not be reported any more. `logs`: how many bytes of each worker's log are
    there. `end`: stop all, and end. `session` is the pool's process's own, `serial` grows with its orders.
    """

    job: Job
    session: Name
    serial: Count
    instance: Name
    workers: Ids = ()
    heard: Ids = ()
    logs: Annotated[dict[Name, Count], msgspec.Meta(max_length=MOST)] = msgspec.field(default_factory=dict)
    end: bool = False


class Report(Message):
    """From an agent. `instance` is its process's own; what another instance had started has ended with it.

    `state`: preparing, ready, or failed with the `reason`. `ended` and `failed`: why, of workers whose end the pool has
    not heard, and of those that never began. `notified`: what is known of the host's own end. `session` and `serial`
    are those of the newest order that it has.
    """

    instance: Name
    state: Name
    reason: Text = ""
    session: Name = ""
    serial: Count = 0
    running: Ids = ()
    ended: Ends = msgspec.field(default_factory=dict)
    failed: Ends = msgspec.field(default_factory=dict)
    notified: Notified | None = None


class Output(Message):
    """From an agent: what a worker has printed, from byte `offset` of its log on."""

    worker: Name
    offset: Count
    content: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]


class ToHost(Message):
    """From a pool, to the agent of one of its hosts."""

    host: Name
    order: Order


class FromHost(Message):
    """To a pool: a host's agent has said that; None: it is not connected any more."""

    host: Name
    said: Report | Output | None = None
