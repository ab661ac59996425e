"""What a machine computes, or a run does, as `farandole numerics` writes it down and `GET /api/numerics` answers it.

Its version is that of the fingerprint: those of two versions can't be compared.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.membership.coordinator import Coordinator
from farandole.membership.likeness import numerics
from farandole.membership.values import Text
from farandole.platform.files import decoded

VERSION = 1
LONGEST = 1 << 20  # bytes of a file
_AGAIN = "write it there anew, with `farandole numerics --json FILE`"


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`facts` by their names. `bits`: how they are computed, same or portable; in a `run` ("" for a machine), what is
    promised there.
    """

    version: int
    facts: dict[Text, Text]
    bits: str
    run: str = ""


class _Version(msgspec.Struct):
    version: int


def of_run(coordinator: Coordinator) -> Numerics:
    """Without facts as long as the run has no worker that has asked in."""
    facts = coordinator.signature.facts if coordinator.signature else ()
    settings = coordinator.settings
    return Numerics(version=VERSION, facts=numerics(facts), run=settings.run, bits=settings.bits)


def write(path: Path, facts: dict[str, str], bits: str) -> None:
    """Raises UsageError where it can't be written."""
    content = msgspec.json.format(msgspec.json.encode(Numerics(version=VERSION, facts=facts, bits=bits)))
    try:
        path.write_bytes(content + b"\n")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None


def read(path: Path) -> Numerics:
    """What `write` has written.

    Raises:
        UsageError: it is not there, is something else, or of another version.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)[:LONGEST]
        version = decoded(content, _Version).version
        if version != VERSION:
            raise UsageError(
                f"{path} is of version {version}, and this farandole compares version {VERSION}: use the same "
                f"farandole on both machines, and {_AGAIN}"
            )
        return decoded(content, Numerics)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a run's ticket, or a file of `farandole numerics`") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path} is neither a ticket nor a file of `farandole numerics`; {_AGAIN}") from None
