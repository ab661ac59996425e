"""What a run ran on and as what, in pairs of words: its settings, versions, numerics, hosts. Pure.

Of another version's settings those are told that this one knows. What is not known is left out.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping
from typing import Any

from farandole.membership.likeness import DECODER, DEVICE, NUMPY, OPERATION, SETTING, TORCH
from farandole.observe.story.story import Story
from farandole.observe.words import not_promised

About = list[tuple[str, str]]
HOSTS = 12  # named


def about(settings: Mapping[str, Any], story: Story, version: str) -> About:
    """`settings`: what settings.json holds, or nothing; `version`: of farandole, that tells."""
    facts = story.numerics.facts if story.numerics else {}
    found: dict[str, Any] = {
        "command": shlex.join(map(str, settings.get("command") or ())),
        "in": settings.get("directory"),
        "commit": settings.get("commit"),
        "code": ", ".join(f"{name} {digest}" for name, digest in settings.get("code") or ()),
        "seed": settings.get("seed"),
        "threads": settings.get("threads"),
        "bits": _bits(settings, story),
        "fingerprint": story.finished.fingerprint if story.finished else None,
        "numeric fingerprint": _fingerprint(facts),
        "hardware": facts.get(DEVICE),
        "torch": facts.get(TORCH),
        "NumPy": facts.get(NUMPY),
        "decoders": ", ".join(f"{n.removeprefix(DECODER)} {v}" for n, v in facts.items() if n.startswith(DECODER)),
        "torch's settings": ", ".join(
            f"{n.removeprefix(SETTING)}: {v}" for n, v in facts.items() if n.startswith(SETTING)
        ),
        "hosts": _hosts(story),
        "checkpoint": story.checkpoint[2] if story.checkpoint else None,
        "began": _at(story.began),
        "last line": _at(story.ended),
        "lines passed over": story.damaged or None,
        "told by": f"farandole {version}",
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _bits(settings: Mapping[str, Any], story: Story) -> str:
    asked = str(settings.get("bits", ""))
    return f"{asked}; {not_promised(story.unpromised.step)}" if story.unpromised else asked


def _fingerprint(facts: Mapping[str, str]) -> str:
    """Of all operations at once: equal where each is."""
    operations = sorted((name, value) for name, value in facts.items() if name.startswith(OPERATION))
    if not operations:
        return ""
    return f"{hashlib.sha256(repr(operations).encode()).hexdigest()[:16]}, of {len(operations)} operations"


def _hosts(story: Story) -> str:
    names = sorted({stay.host for stay in story.stays.all if stay.host})
    shown = ", ".join(names[:HOSTS]) + (", ..." if len(names) > HOSTS else "")
    return f"{len(names)}: {shown}" if len(names) > 1 else shown


def _at(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))
