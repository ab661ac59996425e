"""Any training script, slowed down on request: paced.py SCRIPT [ARGUMENTS ...] --pace FILE

While FILE holds a number, every update of an optimizer takes so many seconds more: a script that is over before
anything can happen to it shows nothing. The script itself knows nothing of it.
"""

import runpy
import sys
from pathlib import Path

from job import pace
from torch.optim.optimizer import register_optimizer_step_post_hook

script, *arguments, _, file = sys.argv[1:]
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).resolve().parent))
register_optimizer_step_post_hook(lambda *_: pace(Path(file)))
runpy.run_path(script, run_name="__main__")
