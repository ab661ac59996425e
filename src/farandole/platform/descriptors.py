"""As many open files as this process may have: who listens takes a descriptor for each that connects."""

from __future__ import annotations

import resource


def allow_all() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
