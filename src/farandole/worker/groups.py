"""How a worker meets its peers: the links of each proposed view, made in the background by a transport.

The keys that tell peers where to find each other go through the control connection (`Publish`, `Published`). A group
that the views have left is closed by the thread that makes the next one, because closing connections takes a while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from farandole.collective.arena import Memory
from farandole.collective.gloo import Rendezvous
from farandole.collective.shm import ByHost
from farandole.collective.transport import Links, PeerLost, Unproved
from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.protocol.worker.member import Connect

_log = logging.getLogger(__name__)

MAX_ADDRESS = 200  # characters


class Groups:
    """`groups` is the worker's own table, by number, which `leave` clears of past ones.

    `memory`: where what this worker sends its peers lies.

    Attributes:
        interface: the address that the data plane binds to.
    """

    def __init__(
        self,
        groups: dict[int, Links],
        tell: Callable[[m.Message], None],
        memory: Memory,
    ) -> None:
        self.interface = ""
        self._groups = groups
        self._tell = tell
        self._memory = memory
        self._rendezvous: dict[int, Rendezvous] = {}
        self._left: list[Links] = []

    def leave(self, view: View, keep: Collection[int]) -> None:
        """`view` is proposed: of the groups only `keep` may still be in use. Does not wait."""
        self._left += [self._groups.pop(number) for number in list(self._groups) if number not in keep]
        for number in [n for n in self._rendezvous if n < view.number]:
            self._rendezvous.pop(number).close()
        if view.group not in self._groups and view.size > 1:
            self._rendezvous[view.group] = Rendezvous(
                lambda key, value, to: self._tell(m.Publish(group=view.group, key=key, value=value, to=to))
            )

    def put(self, message: m.Published) -> None:
        """A key from a peer."""
        if message.group in self._rendezvous:
            self._rendezvous[message.group].put(message.key, message.value)

    def arrange(
        self, connect: Connect, worker: str, prepare: Callable[[], None], connected: Callable[[], None]
    ) -> None:
        """In the background: connect the view's group, `prepare`, and then say that it is `connected`."""
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
            except OSError as error:  # strangers keep its listener from being opened
                self._give_up(view, str(error), worker, self.interface)
                return
            except (RuntimeError, KeyError, PeerLost):
                return  # the view was given up meanwhile, or its deadline will pass: the coordinator decides
            except ValueError as error:
                _log.warning("no connections for view %d: %s", view.number, error)
                return
            connected()

        threading.Thread(target=meet, daemon=True).start()

    def _give_up(self, view: View, why: str, peer: str, address: str) -> None:
        _log.warning("view %d is given up: %s", view.number, why)
        self._tell(m.PeerUnproved(view=view.number, peer=peer, address=address[:MAX_ADDRESS]))

    def meet(self, view: View, worker: str, key: bytes) -> Links | None:
        """Connect the view's group; None if it stands. Raises what `Transport.connect` does."""
        left, self._left = self._left, []
        for links in left:
            links.close()
        if view.group in self._groups or view.size == 1:
            return None
        transport = ByHost(self._rendezvous[view.group], key, self.interface, memory=self._memory)
        return transport.connect(view, worker)
