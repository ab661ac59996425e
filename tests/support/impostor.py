"""`farandole`, with another key than the group's own in the first group that it is to be in: `impostor.py join ...`."""

from __future__ import annotations

from farandole.cli import main
from farandole.collective import gloo
from farandole.collective.gloo import GlooLinks, prove

seen: list[int] = []


def pretend(links: GlooLinks, worker: str, key: bytes) -> None:
    seen.append(links.number)
    prove(links, worker, key if len(seen) > 1 else bytes(len(key)))


if __name__ == "__main__":
    gloo.prove = pretend
    main()
