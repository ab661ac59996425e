"""The file of `farandole run --config`: its values, the command line before it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from farandole.cli.commands import app
from farandole.errors import UsageError
from farandole.pool.spec import pools

COMMANDS: Any = typer.main.get_command(app)

WHOLE = """
script = "train.py"
arguments = ["--width", "64"]
workers = 4
min = 2
checkpoint-every = "30m"
stall = 90
audit = "0.1%"
stop-on-nan = true
equal = true
folder = "runs/a"
verbose = 1
detach = true
pool = ["local,size=2", "pools.toml"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARANDOLE_VERBOSE", "0")  # `verbose` sets it


def parsed(text: str, *words: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values that `farandole run --config run.toml WORDS` begins with."""
    Path("run.toml").write_text(text)
    whole = COMMANDS.make_context("farandole", [*before, "run"])
    command = COMMANDS.get_command(whole, "run")
    return command.make_context("run", ["--config", "run.toml", *words], parent=whole).params


def test_each_kind_of_value_is_that_of_the_command_line() -> None:
    values = parsed(WHOLE)
    words = "--workers 4 --min 2 --checkpoint-every 30m --stall 90 --audit 0.1% --stop-on-nan --equal --folder runs/a"
    words += " -v --detach --pool local,size=2 --pool pools.toml train.py --width 64"
    same = COMMANDS.get_command(None, "run").make_context("run", words.split()).params
    assert {**values, "config": None} == same
    assert values["config"] == Path("run.toml")
    assert {name: type(value) for name, value in values.items() if name != "config"} == {
        name: type(value) for name, value in same.items() if name != "config"
    }


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default() -> None:
    values = parsed(WHOLE, "--workers", "3", "--by-speed", "--pool", "local,size=9", "--no-stop-on-nan")
    assert (values["wanted"], values["by_speed"], values["stop_on_nan"]) == (3, True, False)
    assert values["pool"] == ["local,size=9"]
    assert (values["minimum"], values["stall_s"], values["detached"]) == (2, 90.0, True)
    assert parsed("", "train.py")["stall_s"] == 30.0


def test_a_script_on_the_command_line_replaces_the_script_with_its_arguments() -> None:
    text = 'script = "package.train"\narguments = ["--width", "64"]\nmodule = true\nworkers = 4'
    values = parsed(text)
    assert (values["script"], values["arguments"], values["module"]) == ("package.train", ["--width", "64"], True)
    values = parsed(text, "other.py")
    assert (values["script"], values["arguments"], values["module"]) == ("other.py", (), False)
    assert values["wanted"] == 4
    assert parsed(text, "other.py", "--workers", "7")["arguments"] == ["--workers", "7"]


def test_the_verbosity_of_the_command_line_counts_at_each_place() -> None:
    assert parsed(WHOLE, "-v", "-v")["verbose"] == 2
    assert parsed(WHOLE, before=("-vv",))["verbose"] == 0  # that of `farandole -vv run` stays


def test_pools_are_tables_too() -> None:
    text = 'script = "a.py"\n[[pool]]\nkind = "ssh"\nhosts = "with,comma.txt"\nsize = 3\n[[pool]]\nkind = "local"\n'
    ssh, local = pools(parsed(text)["pool"])
    assert (ssh.kind, ssh.size, ssh.options) == ("ssh", 3, {"hosts": "with,comma.txt"})
    assert (local.kind, local.size) == ("local", None)
    mixed = 'script = "a.py"\npool = ["local,size=2", {kind = "ssh", hosts = "h.txt"}]'
    assert [pool.kind for pool in pools(parsed(mixed)["pool"])] == ["local", "ssh"]
    assert [pool.size for pool in pools(parsed('script = "a.py"\npool = "local,size=2"')["pool"])] == [2]
    with pytest.raises(UsageError, match=r"\[\[pool\]\] 2.*hots"):
        pools(parsed('script = "a.py"\n[[pool]]\nkind = "local"\n[[pool]]\nkind = "ssh"\nhots = "h.txt"')["pool"])


REFUSED = [
    # the file, which values the error names
    ("wrokers = 4", r"'wrokers'.*'workers'"),
    ("checkpoint_every = '5m'", r"'checkpoint_every'.*'checkpoint-every'"),
    ("Workers = 4", r"'Workers'.*'workers'"),
    ("wanted = 4", r"'wanted'"),
    ("[run]\nworkers = 4", r"'run'"),
    ("config = 'other.toml'", r"'config'"),
    ("workers = 4", r"script"),
    ("workers = 4\nseed = 1\nworkers = 5\nkeep = 3\n", r"line 3: workers\b"),
    ("workers = 4\nworkers = 5", r"line 2: workers\b"),
    ("pool = 'local'\n[[pool]]\nkind = 'local'\n", "pool"),
    ("[a]\n[a]\n", r"line 2: a\b"),
    ("by-speed = true\nequal = true", "by-speed and equal"),
    ("workers = '4'", r"workers = '4'.*whole number"),
    ("workers = 4.0", r"workers = 4\.0"),
    ("workers = true", "workers = True"),
    ("stall = '90'", r"stall = '90'.*number"),
    ("stall = true", "stall = True"),
    ("pin = 1", r"pin = 1: .*true or false"),
    ("pin = 'yes'", r"pin = 'yes'"),
    ("folder = 7", r"folder = 7: .*text"),
    ("deadline = 2026-11-01", "deadline = datetime"),
    ("audit = 0.001", r"audit = 0\.001"),
    ("script = ['train.py']", r"script = \['train"),
    ("script = 'a.py'\narguments = ['--width', 64]", r"arguments = \['--width', 64\]"),
    ("script = 'a.py'\narguments = '--width 64'", "arguments = '--width 64'"),
    ("arguments = ['--width', '64']", r"arguments\b.*script"),
    ("pool = 3", r"pool = 3"),
    ("pool = [3]", r"pool = \[3\]"),
    ("[pool]\nkind = 'local'", r"pool = \{.*\[\[pool\]\]"),
    ('folder = "a\\u0000b"', r"folder\b.*NUL"),
    ("workers = \nseed = 1", r"TOML.*line 1\b"),
    ("a = " + "[" * 5000, "TOML"),
    ("workers = " + "1" * 5000, "TOML"),
    ("stall = 0x" + "f" * 5000, "TOML"),
    ('script = "a.py"\n[[pool]]\nkind = "local"\nsize = 0x' + "f" * 5000, "TOML"),
]


@pytest.mark.parametrize(("text", "names"), REFUSED)
def test_what_is_wrong_in_the_file_is_named(text: str, names: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)^--config run\.toml\b.*{names}"):
        parsed(text)


def test_a_file_that_can_not_be_read_is_named() -> None:
    run = COMMANDS.get_command(None, "run")
    Path("folder.toml").mkdir()
    Path("bytes.toml").write_bytes(b"script = '\xff'")
    for name in ("none.toml", "folder.toml", "bytes.toml"):
        with pytest.raises(UsageError, match=f"^--config {name}: "):
            run.make_context("run", ["--config", name])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("run --workers 2 --workers 3 train.py", "--workers"),
        ("run --config a.toml --config b.toml train.py", "--config"),
        ("run --by-speed --equal train.py", "--by-speed or --equal"),
        ("run -m --module package.train", "--module"),
        ("scale 3 --run a --run b", "--run"),
        ("join --notices aws --notices aws TICKET train.py", "--notices"),
        ("hosts check hosts.txt --ssh a --ssh b", "--ssh"),
    ],
)
def test_an_option_that_is_given_twice_is_named(words: str, names: str) -> None:
    command, rest = COMMANDS, words.split()
    while hasattr(command, "commands"):
        command, rest = command.get_command(None, rest[0]), rest[1:]
    with pytest.raises(UsageError, match=names):
        command.make_context("x", rest)


@pytest.mark.parametrize("command", ["status", "account", "stop", "top"])
def test_a_folder_that_is_given_without_its_option_names_the_option(command: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--run {tmp_path}"):
        COMMANDS.get_command(None, command).make_context("x", [str(tmp_path)])


def test_what_may_be_repeated_is_accepted() -> None:
    run = COMMANDS.get_command(None, "run")
    words = ["-v", "-v", "--pool", "local", "--pool", "ssh,hosts=h", "train.py", "--seed", "1", "--seed", "2"]
    values = run.make_context("run", words).params
    assert (values["verbose"], values["pool"]) == (2, ["local", "ssh,hosts=h"])
    assert values["arguments"] == ["--seed", "1", "--seed", "2"]
