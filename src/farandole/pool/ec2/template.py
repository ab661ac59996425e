"""What a launch template must have so that its instances join a run and never outlive it; and the user data for it.

The same template serves all runs, a person at the console and auto scaling groups: which run an instance belongs to is
said by its tags, which the instance reads from its metadata. The ticket is no part of it: the instance's own role
reads that from a secret. The user data ends the instance whatever becomes of the rest: `shutdown`, for which the
template says `terminate`.
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from farandole.errors import UsageError

MARK = "# farandole: "
RUN, POOL, STATE, REQUEST = "farandole:run", "farandole:pool", "farandole:state", "farandole:request"
KEEP, UNTIL = "farandole:keep-failed", "farandole:until"

SCRIPT = """#!/bin/sh
{mark}an instance of this launch template joins the run that its tags name, and ends with it.
umask 022
AGAIN=/var/lib/cloud/scripts/per-boot/farandole
if [ -d /var/lib/cloud/scripts ] && [ "$0" != "$AGAIN" ]; then  # an instance that is started again joins again
    mkdir -p /var/lib/cloud/scripts/per-boot && cp "$0" "$AGAIN" && chmod 755 "$AGAIN"
fi
trap 'shutdown -h now' EXIT
{python} -m farandole instance
"""


def user_data(python: str) -> str:
    """A script; `python` is the interpreter of the image that has farandole, with the extra `aws`."""
    return SCRIPT.format(mark=MARK, python=shlex.quote(python))


def secret_name(run: str, pool: str) -> str:
    """Of the parameter that holds the run's ticket."""
    return f"/farandole/{run}/{re.sub(r'[^A-Za-z0-9_.-]', '-', pool)}"


def check(name: str, data: Mapping[str, Any]) -> None:
    """`data`: of the launch template's version, as AWS gives it.

    Raises:
        UsageError: instances of it would not join, would outlive their run, or would let others read its ticket.
    """
    wrong = list(_wrong(data))
    if wrong:
        raise UsageError(f"launch template {name}: " + "; ".join(wrong))


def _wrong(data: Mapping[str, Any]) -> Iterator[str]:
    try:
        script = base64.b64decode(data.get("UserData", ""), validate=True).decode(errors="replace")
    except binascii.Error:
        script = ""
    metadata = data.get("MetadataOptions", {})
    if MARK not in script:
        yield "its user data does not join a run; give it what `farandole pool user-data` prints"
    if data.get("InstanceInitiatedShutdownBehavior") != "terminate":
        yield 'an instance that shuts down would only be stopped; set "InstanceInitiatedShutdownBehavior": "terminate"'
    if metadata.get("InstanceMetadataTags") != "enabled":
        yield 'its instances can\'t read their tags; set "MetadataOptions": {"InstanceMetadataTags": "enabled"}'
    if metadata.get("HttpTokens") != "required":
        yield (
            'its instances\' metadata can be read without a token; set "MetadataOptions": {"HttpTokens": "required"}'
        )
    if not data.get("IamInstanceProfile"):
        yield "it has no role, and its instances could not read the run's ticket; set IamInstanceProfile"
