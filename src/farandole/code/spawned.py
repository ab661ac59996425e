"""The start of a process that a worker spawns: it runs the run's copy of the script, as `__mp_main__`.

multiprocessing's start methods "spawn" and "forkserver" run the script once more in each new process, because objects
refer to it. Without this module they would run the present file (`code/snapshot.py`). All names here become names of
the script, so they begin with an underscore.
"""

import sys as _sys
from pathlib import Path as _Path

from farandole.code import snapshot as _sources
from farandole.code.pack import Origin as _Origin
from farandole.settings import Settings as _Settings

_copies = _Path(_Settings.read().code)
_sys.argv[0] = _Origin.read(_copies).script
_sources.install(_sys.argv[0], _copies).run_as(_sys.modules[__name__])
