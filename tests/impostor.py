"""`farandole`, with another key than the group's own in the first group that it is to be in: `impostor.py join ...`."""

from __future__ import annotations

from farandole.cli import main
from farandole.collective.group import Group
from farandole.collective.proof import prove
from farandole.control import meetings

groups: list[int] = []


def pretend(group: Group, worker: str, key: bytes) -> None:
    groups.append(group.number)
    prove(group, worker, key if len(groups) > 1 else bytes(len(key)))


if __name__ == "__main__":
    meetings.prove = pretend
    main()
