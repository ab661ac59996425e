"""Where a run listens, what its ticket says, and what of it survives the coordinator."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.control import security
from farandole.control.ticket import Ticket, load, new_secret
from farandole.coordinator.listener import advertised, endpoint, is_loopback, parse
from farandole.errors import UsageError

LISTEN = [
    ("127.0.0.1", ("127.0.0.1", 0)),
    ("10.0.0.5:4000", ("10.0.0.5", 4000)),
    ("localhost:0", ("localhost", 0)),
    ("node-1.example:4000", ("node-1.example", 4000)),
    ("0.0.0.0", ("0.0.0.0", 0)),
    ("::", ("::", 0)),
    ("fd00::5", ("fd00::5", 0)),
    ("[fd00::5]:4000", ("fd00::5", 4000)),
]


@pytest.mark.parametrize(("listen", "expected"), LISTEN)
def test_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert parse(listen) == expected


@pytest.mark.parametrize("listen", ["", ":4000", "host:port", "host:70000", "a b/c", "http://host", "me@host", "[::1"])
def test_what_is_no_address_is_named(listen: str) -> None:
    with pytest.raises(UsageError, match=r"--listen .*HOST:PORT"):
        parse(listen)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_an_error_of_ours(listen: str) -> None:
    try:
        host, port = parse(listen)
    except UsageError:
        return
    assert host
    assert 0 <= port < 65536


def test_only_loopback_goes_without_a_certificate(tmp_path: Path) -> None:
    assert endpoint(tmp_path, "localhost").certificate is None
    assert not (tmp_path / "tls.pem").exists()
    for listen in ("10.0.0.5", "0.0.0.0", "::", "anything"):
        assert not is_loopback(parse(listen)[0])
        assert endpoint(tmp_path, listen).certificate is not None


def test_everything_survives_the_coordinators_process(tmp_path: Path) -> None:
    first = endpoint(tmp_path, "10.0.0.5")
    assert stat.S_IMODE((tmp_path / "tls.pem").stat().st_mode) == 0o600
    address = f"https://{advertised(first.host)}:4321"
    Ticket(address=address, secret=first.secret, run="r", fingerprint=first.fingerprint).save(tmp_path / "ticket")
    second = endpoint(tmp_path, "10.0.0.5", is_restart=True)
    assert (second.secret, second.fingerprint, second.port) == (first.secret, first.fingerprint, 4321)
    assert load(str(tmp_path / "ticket")).fingerprint == second.fingerprint
    assert endpoint(tmp_path, "10.0.0.5:99", is_restart=True).port == 99, "what is asked for beats what was"


def test_a_run_that_begins_takes_over_no_ticket(tmp_path: Path) -> None:
    planted = Ticket(address="http://127.0.0.1:4321", secret=new_secret(), run="r")
    planted.save(tmp_path / "ticket")
    begun = endpoint(tmp_path, "127.0.0.1")
    assert begun.secret != planted.secret
    assert begun.port == 0


def test_two_runs_have_nothing_in_common(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = (endpoint(tmp_path / name, "10.0.0.5") for name in "ab")
    assert a.secret != b.secret
    assert a.fingerprint != b.fingerprint


def test_a_damaged_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "tls.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "tls.pem"))):
        endpoint(tmp_path, "10.0.0.5")


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setattr(security.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install .*\[tls\]"):
        endpoint(tmp_path, "10.0.0.5")
    assert endpoint(tmp_path, "127.0.0.1").certificate is None


def test_what_is_advertised() -> None:
    assert advertised("10.0.0.5") == "10.0.0.5"
    assert advertised("fd00::5") == "[fd00::5]"
    assert advertised("node1") == "node1"
