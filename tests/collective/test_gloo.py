"""A view's connections in a forked process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKS = """
import gc, os

def collected():
    gc.set_threshold(1)
    return [[] for _ in range(100)]

os.register_at_fork(after_in_child=collected)  # by whoever came before us
from farandole.collective.gloo import GlooLinks
from farandole.collective.gloo import Rendezvous

gc.set_threshold(1000000)
links = GlooLinks(1, "a", ("a",), Rendezvous(lambda key, value, to: None), "127.0.0.1")
links.keep_alive(links)  # a cycle: only a collection finds it
del links
child = os.fork()
if child == 0:
    assert gc.isenabled()
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert gc.isenabled()
gc.collect()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_destroy_the_groups_that_it_inherits() -> None:
    """Gloo would wait there for threads that only the parent has."""
    try:
        done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=200, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("the forked process hangs")
    assert done.returncode == 0, done.stderr
