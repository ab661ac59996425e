"""The connections of a worker to its peers: a transport makes the links of each proposed view in the background.

The rendezvous keys go through the control connection (`Publish`, `Published`). A group that is no longer used is closed
by the thread that makes the next one, because closing connections takes a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from farandole.collective.arena import Memory
from farandole.collective.codec import NONE
from farandole.collective.compression import Payoff
from farandole.collective.gloo import Rendezvous
from farandole.collective.link_meter import LinkMeter
from farandole.collective.shm import ByHost
from farandole.collective.transport import Links, PeerLost, Unproved
from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.protocol.worker.state_machine import Connect

_log = logging.getLogger(__name__)

MAX_ADDRESS = 200  # characters


class Groups:
    """The groups of connections of one worker.

    `groups` is the worker's own table of links by group number; `prepare_for` removes past groups from it. Tensors in
    `memory` can be shared with peers. `meter` measures what goes to other hosts.

    Attributes:
        interface: the address that the data plane binds to.
        codec: the codec of the run.
    """

    def __init__(
        self,
        groups: dict[int, Links],
        tell: Callable[[m.Message], None],
        memory: Memory,
        meter: LinkMeter,
    ) -> None:
        self.interface = ""
        self.codec = NONE
        self._groups = groups
        self._tell = tell
        self._memory = memory
        self._meter = meter
        self._payoff = Payoff()
        self._rendezvous: dict[int, Rendezvous] = {}
        self._unused: list[Links] = []  # to be closed

    def prepare_for(self, view: View, keep: Collection[int]) -> None:
        """Prepares for the proposed `view`: removes all groups except those in `keep`. Does not block."""
        self._unused += [self._groups.pop(number) for number in list(self._groups) if number not in keep]
        for number in [n for n in self._rendezvous if n < view.number]:
            self._rendezvous.pop(number).close()
        if view.group not in self._groups and view.size > 1:
            self._rendezvous[view.group] = Rendezvous(
                lambda key, value, to: self._tell(m.Publish(group=view.group, key=key, value=value, to=to))
            )

    def put(self, message: m.Published) -> None:
        """Stores a rendezvous key from a peer."""
        if message.group in self._rendezvous:
            self._rendezvous[message.group].put(message.key, message.value)

    def arrange(
        self, connect: Connect, worker: str, prepare: Callable[[], None], connected: Callable[[], None]
    ) -> None:
        """Connects the view's group in a background thread, then calls `prepare` and `connected`."""
        view = connect.view

        def meet() -> None:
            try:
                links = self.meet(view, worker, connect.key)
                if links is not None:
                    self._groups[view.group] = links
                    _log.info("view %d: connected with %s", view.number, ", ".join(view.members))
                prepare()
            except Unproved as error:
                self._give_up(view, str(error), error.peer, error.address)
                return
            except OSError as error:  # unknown processes prevent the listener from being opened
                self._give_up(view, str(error), worker, self.interface)
                return
            except (RuntimeError, KeyError, PeerLost):
                return  # the view was given up, or its deadline passes: the coordinator decides
            except ValueError as error:
                _log.warning("no connections for view %d: %s", view.number, error)
                return
            connected()

        threading.Thread(target=meet, daemon=True).start()

    def _give_up(self, view: View, why: str, peer: str, address: str) -> None:
        _log.warning("giving up view %d: %s", view.number, why)
        self._tell(m.PeerNotAuthenticated(view=view.number, peer=peer, address=address[:MAX_ADDRESS]))

    def meet(self, view: View, worker: str, key: bytes) -> Links | None:
        """Connects the view's group; None if there is nothing to connect. Raises the errors of `Transport.connect`."""
        unused, self._unused = self._unused, []
        for links in unused:
            links.close()
        if view.group in self._groups or view.size == 1:
            return None
        transport = ByHost(
            self._rendezvous[view.group],
            key,
            self.interface,
            memory=self._memory,
            compressed=self.codec.compressed,
            payoff=self._payoff if self.codec.adapts else None,
            meter=self._meter,
        )
        return transport.connect(view, worker)
