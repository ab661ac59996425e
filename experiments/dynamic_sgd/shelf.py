"""Where results lie: `results/SCALE/TASK/HISTORY-POLICY-SEED.json`, a file a training, written whole or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec

from experiments.dynamic_sgd.cases import ADAPTIVE, Case, Scale, by_samples
from experiments.dynamic_sgd.measures import Result, Row, paired

RESULTS = Path(__file__).resolve().parent / "results"


def path(case: Case, scale: Scale) -> Path:
    return RESULTS / scale.name / f"{case.name}.json"


def put(case: Case, scale: Scale, result: Result) -> None:
    place = path(case, scale)
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_suffix(".half")
    facts = {"case": dataclasses.asdict(case), "sizes": scale.sizes, "result": dataclasses.asdict(result)}
    lines = (f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in facts.items())
    half.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    half.replace(place)


def get(case: Case, scale: Scale) -> Result | None:
    """The case's result, if there is one.

    Raises:
        SystemExit: it was made with other sizes, so it belongs to another study.
    """
    place = path(case, scale)
    if not place.is_file():
        return None
    facts = json.loads(place.read_text())
    made, now = (facts["case"], facts["sizes"]), (dataclasses.asdict(case), scale.sizes)
    if made != now:
        raise SystemExit(f"{place} was made with {made}, and now it is {now}; delete it, or undo the change")
    return msgspec.convert(facts["result"], Result)


def static(task: str, scale: Scale, policy: str = "compensation") -> dict[int, Result]:
    """The static runs that are there, by seed; `policy`: with whose optimizer. The rule has no part in them."""
    return of(task, "one", "root" if policy in ADAPTIVE else "compensation", scale)


def of(task: str, history: str, policy: str, scale: Scale, rate: float = 0) -> dict[int, Result]:
    """The results that are there, by seed."""
    found: dict[int, Result] = {}
    for seed in range(max(scale.seeds, scale.static_seeds)):
        case = Case(task=task, history=history, policy=policy, seed=seed, rate=rate or scale.rate(task, policy))
        result = get(case, scale)
        if result is not None:
            found[seed] = result
    return found


def compared(task: str, history: str, policy: str, scale: Scale) -> Row:
    """Whatever is there of `policy` under `history`, against the static runs of the same seeds."""
    return paired(
        of(task, history, policy, scale),
        static(task, scale, policy),
        lambda seed: by_samples(history, scale.total, seed),
    )
