"""The clouds that can be asked for notices, by the names that a user gives them."""

from __future__ import annotations

from farandole.errors import UsageError

EC2, GOOGLE, AZURE, NONE = "ec2", "gcp", "azure", "none"
HELP = (
    f"Cloud whose metadata service announces this machine's preemption: {EC2}, {GOOGLE}, {AZURE} or {NONE}. "
    "Without it, each is tried."
)


def check(cloud: str) -> str:
    """Raises UsageError: no such cloud."""
    if cloud not in ("", EC2, GOOGLE, AZURE, NONE):
        names = f"{EC2}, {GOOGLE}, {AZURE} or {NONE}"
        raise UsageError(f"--notices {cloud}: no such cloud; give {names}, or leave it out to have it found")
    return cloud
