"""TCP's congestion control in a benchmark's network namespaces."""

from __future__ import annotations

import subprocess

# Linux' default. With BBR, which some systems use, a step at 100 Mbit/s took up to 0.3 s longer, by chance. With Reno a
# step at 1 Gbit/s took 237 ms instead of 174: the first packet of a connection is dropped (section `listener` of
# `collective/gloo.py`), and Reno's congestion window then grows by one packet a round trip.
CUBIC = "net.ipv4.tcp_congestion_control=cubic"
ALLOW = 'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'


def use_cubic(namespace: str) -> None:
    """Make connections in a network namespace use cubic. Raises SystemExit if the system does not allow it."""
    command = ["ip", "netns", "exec", namespace, "sysctl", "-w", CUBIC]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr}this system does not allow {CUBIC}; as root: {ALLOW}")
