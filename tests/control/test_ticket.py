"""The ticket travels as a file that nobody else can read, and its secret is never shown."""

from __future__ import annotations

import io
import re
import stat
import sys
from pathlib import Path

import pytest

from farandole.control.ticket import Ticket, load, new_secret
from farandole.errors import UsageError

TICKET = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")


def test_saved_ticket_loads_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    TICKET.save(path)
    assert load(str(path)) == TICKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    TICKET.save(path)  # again: replaces
    assert [p.name for p in tmp_path.iterdir()] == ["ticket"]


def test_secret_has_256_random_bits_and_is_not_in_repr() -> None:
    assert len(bytes.fromhex(TICKET.secret)) == 32
    assert new_secret() != new_secret()
    assert TICKET.secret not in repr(TICKET) + str(TICKET) + f"{[TICKET]}"


def test_ticket_on_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    TICKET.save(path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert load("-") == TICKET


def test_missing_ticket_says_where_tickets_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none"))):
        load(str(tmp_path / "none"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"address": "a", "secret": "hush", "run": 3}'])
def test_unparsable_ticket_is_named_but_never_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ticket"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
        load(str(path))
    assert "hush" not in str(caught.value)
