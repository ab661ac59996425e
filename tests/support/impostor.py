"""`farandole`, with another key than the group's own in the first group that it is to be in: `impostor.py join ...`."""

from __future__ import annotations

from farandole.cli import main
from farandole.collective.proof import prove
from farandole.collective.transport import Group
from farandole.worker import groups

seen: list[int] = []


def pretend(group: Group, worker: str, key: bytes) -> None:
    seen.append(group.number)
    prove(group, worker, key if len(seen) > 1 else bytes(len(key)))


if __name__ == "__main__":
    groups.prove = pretend
    main()
