"""Nothing that was received can become code: no call in the package can unpickle or evaluate.

By the syntax tree of every file, so that a call in a branch that no test takes counts too. Two ways to run code remain,
and neither sees received data: a loader of Python's import system runs the user's own script, named by its path on this
machine's command line, and the modules of its folder, or the run's copies of them;
and DataLoader workers, where a script asks for them, are this process's own children, to which torch's multiprocessing
pickles the dataset that the script has made and from which it gets tensors.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch.distributed as dist

import farandole
from tests.support.every import every

PACKAGE = Path(farandole.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
OBJECTS = {name for name in dir(dist) if "object" in name} | {"send_object_list", "recv_object_list"}
LOADERS = {"load", "loads", "load_state_dict_from_url", "load_state_dict_from_file", "hub"}
YAML = {"safe_load", "YAMLError"}  # its other loaders make objects of any class
RUNNERS = {"runpy", "SourceFileLoader", "exec_module", "source_to_code"}
RUNNING = {"snapshot.py", "fork_server.py"}


def findings(source: str) -> list[str]:
    """What could unpickle or evaluate, one text each."""
    found: list[str] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [module for module in modules if module.split(".")[0] in MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "yaml"):
                found += [f"{node.module}.{a.name} by its bare name" for a in node.names if a.name in LOADERS]
        elif isinstance(node, ast.Attribute):
            found += [f"{node.attr} pickles"] if node.attr in OBJECTS else []
            found += [f"yaml.{node.attr}"] if ast.unparse(node.value) == "yaml" and node.attr not in YAML else []
        elif isinstance(node, ast.Call):
            found += _call(node)
    return found


def _call(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    options = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if called in BUILTINS:
        return [called]
    if called == "torch.load" and options.get("weights_only") != "True":
        return ["torch.load without weights_only=True"]
    if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        return ["numpy.load with allow_pickle"]
    if called.startswith(("torch.hub.", "torch.jit.load", "torch.package.", "torch.export.load")):
        return [called]
    if called.endswith((".read_pickle", ".unpickle", ".Unpickler")):
        return [called]
    return []


@every(FILES)
def test_no_file_can_unpickle_or_evaluate(path: Path) -> None:
    source = path.read_text()
    assert findings(source) == []
    running = any(runner in source for runner in RUNNERS)
    assert running == (path.name in RUNNING), "only a worker's own process runs a script"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "from torch import load",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "eval(text)",
        "if never:\n    exec(text)",
        "import torch.distributed as dist\ndist.broadcast_object_list(items)",
        "import torch.distributed as dist\ndist.all_gather_object(items, item)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.unsafe_load(text)",
        "from yaml import load",
        "torch.jit.load(path)",
        "x.read_pickle(path)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert findings(source)


def test_what_is_allowed_is_not_found() -> None:
    assert findings("torch.load(path, weights_only=True)\njson.loads(text)\nmodel.load_state_dict(state)") == []
