"""The clouds whose preemption notices can be read, with the names that users give them."""

from __future__ import annotations

from farandole.errors import UsageError

EC2, GOOGLE, AZURE, NONE = "ec2", "gcp", "azure", "none"
HELP = (
    f"Cloud whose metadata service announces this machine's preemption: {EC2}, {GOOGLE}, {AZURE} or {NONE}. "
    "Without it, each is tried."
)


def check(cloud: str) -> str:
    """Return `cloud` if it is a known name or "". Raises UsageError: it is not."""
    if cloud not in ("", EC2, GOOGLE, AZURE, NONE):
        names = f"{EC2}, {GOOGLE}, {AZURE} or {NONE}"
        raise UsageError(f"--notices {cloud}: unknown cloud; give {names}, or leave it out to try each of them")
    return cloud
