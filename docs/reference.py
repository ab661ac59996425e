"""Pages of the reference that are made from the code: API, command line, events, failures.

Each function returns the Markdown of one page; `docs/site.py` adds them to the site. No page is stored, so none can
contradict the code. Needs no torch: the API page names objects, whose docstrings mkdocstrings reads from the sources.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import farandole
from farandole.cli.commands import command as program
from farandole.observe.text import describe
from farandole.protocol import events
from tests.support.metric_lines import KINDS, an

ROOT = Path(__file__).resolve().parents[1]


def cell(text: str) -> str:
    """`text` as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body]) + "\n"


# --- API --------------------------------------------------------------------------------------------------------------

GROUPS = {  # title: the public names of the package, then objects of other modules
    "The run": ("join", "Run"),
    "A step": ("Step",),
    "The batch": ("GlobalBatch", "PerWorkerBatch"),
    "Rules for the learning rate": (
        "LinearScaling", "SquareRoot", "MomentumCompensation", "RateInBuffer", "AdaScale",
    ),
    "Data sets": ("ShardedImages", "Synthetic", "Tokens", "WebDataset", "Table", "MDS"),
    "Transforms": ("RandomResizedCrop", "Resize", "Normalize"),
    "Integrations": (
        "integrations.transformers.Trainer", "integrations.transformers.Seq2SeqTrainer",
        "integrations.lightning.FarandoleStrategy", "integrations.ray.run", "integrations.ray.ScalingConfig",
        "integrations.ray.RunConfig", "integrations.ray.Checkpoint", "integrations.ray.Result",
    ),
    "Your own pool": ("pool.base.Pool", "pool.base.Host", "pool.base.PoolContext", "pool.base.PoolKind"),
    "Errors": (
        "FarandoleError", "errors.UsageError", "errors.NotReplicated", "errors.LossNotScalar",
        "errors.NotDeterministic", "errors.StepAbandoned", "errors.UnknownState", "errors.RunFolderInUse",
        "errors.NotPrivate", "errors.Refused", "errors.WorkerSuperseded", "errors.CheckpointsGone",
        "errors.CoordinatorUnreachable", "errors.CoordinatorAway", "errors.NotTheCoordinator",
        "errors.HostNotPrepared", "errors.ShardError", "errors.BadSample", "errors.LoaderDied",
        "errors.LedgerError", "errors.LedgerIncomplete",
    ),
}  # fmt: skip
INTERNAL = {  # public methods that only the package calls
    "Run": ("finish", "may_end", "end", "fail", "dismissed", "notice", "last_word"),
    "integrations.lightning.FarandoleStrategy": (".*",),  # methods of Lightning's interface
    "integrations.transformers.Trainer": (".*",),
    "integrations.transformers.Seq2SeqTrainer": (".*",),
}

MADE_BY_THE_PACKAGE = {"Run", "Step"}  # a script calls no constructor of these


def api() -> str:
    """The page of all public names. mkdocstrings replaces each `:::` by a signature and a docstring."""
    parts = [
        "# API\n\n`farandole.join()` returns the [`Run`][farandole.Run]; a loop over "
        "[`run.steps`][farandole.Run.steps] trains. Everything under a heading without a module's name is imported "
        "from `farandole`.\n"
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.append(f"::: farandole.{name}\n")
            filters = ["!^_", *(f"!^{method}$" for method in INTERNAL.get(name, ()))]
            shows_init = name not in MADE_BY_THE_PACKAGE
            parts.append(f"    options:\n      filters: {filters}\n      merge_init_into_class: {shows_init}\n")
    return "\n".join(parts)


def undocumented() -> set[str]:
    """Public names of the package that the API page lacks."""
    return {*farandole.__all__} - {name for names in GROUPS.values() for name in names} - {"__version__"}


# --- command line -----------------------------------------------------------------------------------------------------


def _commands(found: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if words:
        yield words, found
    for name, inner in getattr(found, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(inner, (*words, name))


def _rows(found: Any, context: Any) -> Iterator[tuple[str, str, str]]:
    """(panel, name, help) of each argument and option."""
    for parameter in found.params:
        record = parameter.get_help_record(context)
        if record is not None and not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None)
            yield panel if isinstance(panel, str) else "", f"`{record[0]}`", record[1].replace("<", "&lt;")


def command_line() -> str:
    """The page of all commands, from their own help."""
    parts = ["# Command line\n\nThe help of each command, as `farandole COMMAND --help` prints it.\n"]
    for words, found in _commands(program):
        name = f"farandole {' '.join(words)}"
        parts.append(f"{'#' * (len(words) + 1)} {name}\n\n{found.help or ''}\n")
        panels: dict[str, list[tuple[str, ...]]] = {}
        for panel, *row in _rows(found, found.context_class(found, info_name=name)):
            panels.setdefault(panel, []).append(tuple(row))
        for panel, rows in sorted(panels.items(), key=lambda item: item[0] != ""):
            parts.append(f"**{panel}**\n" if panel else "")
            parts.append(table(("option", "meaning"), *rows))
    return "\n".join(parts)


# --- events -----------------------------------------------------------------------------------------------------------


def _sections(source: str) -> dict[str, str]:
    """The title of the section of a source in which each class stands."""
    title, sections = "", {}
    for line in source.splitlines():
        if heading := re.match(r"# --- ([\w ]+) -{60,}", line):
            title = heading[1]
        elif found := re.match(r"class (\w+)\(", line):
            sections[found[1]] = title
    return sections


def event_table() -> str:
    """The page of all events, from the structs of `protocol/events.py` and their docstrings."""
    sections = _sections(Path(events.__file__).read_text())
    parts = [
        "# Events\n\nEach event is a line of `metrics.jsonl` in the folder of the run: a JSON object with `event` (its "
        "name), `time` (Unix time in seconds) and the fields below. A field that has its default value may be left "
        "out. In the third column `x`, `w1`, `w2` and `3` stand for values.\n"
    ]
    titles = list(dict.fromkeys(sections[kind.__name__] for kind in KINDS.values()))
    for title in sorted(titles, key=list(sections.values()).index):
        rows = [("event", "meaning", "shown as", "fields")]
        for name, kind in sorted(KINDS.items()):
            if sections[kind.__name__] == title:
                fields = [f"`{each}`" for each in kind.__struct_fields__ if each != "time"]
                rows.append((f"`{name}`", kind.__dict__.get("__doc__") or "", describe(an(kind)), ", ".join(fields)))
        parts.append(f"## {title.capitalize()}\n\n{table(*rows)}")
    return "\n".join(parts)


# --- failures ---------------------------------------------------------------------------------------------------------

SECTIONS = (  # of the table of failures, in its order
    "Scripts that differ between workers", "The training loop", "Data and loader processes",
    "Other code than the run's", "Checkpoints", "Files, disks and output", "Standing still",
    "Processes, signals and crash loops", "External workers, pools and machines", "Command line",
)  # fmt: skip


@dataclass(kw_only=True)
class Failure:
    """A row of the table of failures: what goes wrong, what the user sees, what happens then, and the tests."""

    section: str
    failure: str
    seen: str = ""
    outcome: str = ""
    tests: list[str] = field(default_factory=list)


def markers(source: str) -> Iterator[tuple[str, tuple[str, ...], dict[str, str]]]:
    """(test, arguments, keywords) of each `@pytest.mark.failure(...)` in the source of a test file."""
    if "pytest.mark.failure" not in source:  # parsing all test files takes seconds
        return
    for node in ast.walk(ast.parse(source)):
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.failure":
                keywords = {str(each.arg): ast.literal_eval(each.value) for each in mark.keywords}
                yield node.name, tuple(map(ast.literal_eval, mark.args)), keywords


def failures(folder: Path = ROOT / "tests") -> list[Failure]:
    """The rows, from the markers of all tests below `folder`. No test is imported or run.

    Several tests may show one failure: one of them says what is seen and what the outcome is.

    Raises:
        ValueError: no marker, or more than one, of a failure says what is seen and what the outcome is.
    """
    rows: dict[tuple[str, str], Failure] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for test, (section, failure), told in markers(path.read_text()):
            row = rows.setdefault((section, failure), Failure(section=section, failure=failure))
            row.tests.append(f"{path.relative_to(folder.parent)}::{test}")
            if told and row.seen:
                raise ValueError(f"{row.tests[-1]}: another test has said already what is seen of: {failure}")
            row.seen, row.outcome = told.get("seen", row.seen), told.get("outcome", row.outcome)
    for row in rows.values():
        if not (row.seen and row.outcome):
            raise ValueError(f"{row.tests[0]}: say seen= and outcome= in one marker of: {row.failure}")
    return list(rows.values())


def failure_table() -> str:
    """The page of failures, from the markers `@pytest.mark.failure` of the tests."""
    parts = [
        "# Table of failures\n\nEach row is something that can go wrong in a run, what you see of it, what happens "
        "then, and the tests that make it happen. Words in capitals are the beginning of an event. Times are the "
        "defaults. `after-step-N...pt` is a state saved between two steps, from which no run resumes by itself. "
        "[What can go wrong](../what_can_go_wrong.md) says what farandole does not detect.\n"
    ]
    rows = failures()
    for title in SECTIONS:
        cells = [
            (row.failure, row.seen, row.outcome, "<br>".join(f"`{test}`" for test in row.tests))
            for row in rows
            if row.section == title
        ]
        parts.append(f"## {title}\n\n{table(('what goes wrong', 'what you see', 'what happens', 'test'), *cells)}")
    return "\n".join(parts)
