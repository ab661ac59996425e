"""Trains a function on a Ray cluster from Python: the function is the script of a `farandole run --pool ray`.

    def train(config):
        run = farandole.join()
        ...

    result = farandole.integrations.ray.run(train, {"lr": 0.1}, workers=(2, 16))

The names of arguments, configurations and results are those of Ray Train, and `scaling_config` and `run_config` may be
objects of Ray Train. The function is stored by Ray's cloudpickle and travels to the workers with the files of the
working folder (`code/pack.py`). The Python of the nodes must have ray and farandole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from farandole.code.pack import check_sizes, link, listing
from farandole.control.run_folder import METRICS, Tail
from farandole.coordinator import listener
from farandole.errors import FarandoleError, UsageError
from farandole.observe.past import past
from farandole.platform.extras import how_to_install
from farandole.pool.ray import parse
from farandole.protocol.metrics import LogLine, StepLine, parse_line
from farandole.settings import of_other_hosts

SCRIPT, FUNCTION = "train_function.py", "train_function.pickle"
STORAGE = "runs"
WORKER = """\
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[1:1] = [str(here / name) for name in {folders!r}]
from ray import cloudpickle

function, arguments = cloudpickle.loads((here / {stored!r}).read_bytes())
function(*arguments)
"""
# Starts `farandole run` in a session of its own, so that signals of a terminal or a Ray job reach only the program that
# called `run`. When that is gone, Linux sends SIGHUP (`PR_SET_PDEATHSIG`), and the run stops with a checkpoint. It may
# come several times, once for each thread of the program, and `farandole run` counts only the first SIGHUP.
STARTER = (
    "import ctypes,os,signal,sys\n"
    "os.setsid()\n"
    "signal.signal(signal.SIGHUP,signal.SIG_DFL)\n"
    "sys.platform=='linux' and ctypes.CDLL(None).prctl(1,int(signal.SIGHUP),0,0,0)\n"
    "os.getppid()==int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.executable,[sys.executable,*sys.argv[2:]])"
)

# --- configurations and results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many workers, and what each of them needs. The fields are some of those of `ray.train.ScalingConfig`.

    Attributes:
        num_workers: the most workers, or (fewest, most). Training begins with the fewest, which is 1 if only the most
            is given, and pauses while there are fewer.
        use_gpu: True: each worker needs a GPU, if `resources_per_worker` has no number of GPUs.
        resources_per_worker: the amount of each resource by its name, such as {"CPU": 4, "GPU": 1, "spot": 1}.
        label_selector: the labels that a node must have, by their keys.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    label_selector: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is stored. The fields are some of those of `ray.train.RunConfig`.

    Attributes:
        name: the name of the run's folder; None: a new one, by the time and the function's name. A folder that has a
            run: that run continues.
        storage_path: the local folder that holds the run's folder; None: `runs`.
    """

    name: str | None = None
    storage_path: str | None = None


class TrainingFailed(FarandoleError):
    """The run did not finish. The message has the reason and the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint. `path`: the file, for `torch.load(path, weights_only=True)`."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has come to.

    Attributes:
        metrics: the last value of each metric: of the steps (`loss`, `samples`, ...) and of `run.log`.
        checkpoint: the newest checkpoint, of the end of training; None if there is none.
        path: the run's folder, as `farandole status --run` takes it.
    """

    metrics: Mapping[str, Any]
    checkpoint: Checkpoint | None
    path: str

    @property
    def metrics_dataframe(self) -> Any:
        """The metrics of each step as a `pandas.DataFrame`: a row a step, a column a metric.

        Raises:
            UsageError: pandas is not installed.
        """
        if importlib.util.find_spec("pandas") is None:
            raise UsageError("metrics_dataframe: pandas is not installed; pip install pandas, or use result.metrics")
        rows = dict[int, dict[str, Any]]()
        for step, values in _metrics(Path(self.path)):
            rows.setdefault(step, {}).update(values)
        return importlib.import_module("pandas").DataFrame(list(rows.values()))


def _lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of a run's metrics.jsonl."""
    tail = Tail(folder / METRICS)
    while lines := tail.lines():
        yield from lines


def _metrics(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the metrics of each line of a run with its step."""
    for line in map(parse_line, _lines(folder)):
        if isinstance(line, StepLine):
            yield line.step, msgspec.structs.asdict(line)
        elif isinstance(line, LogLine):
            yield line.step, dict(line.fields)


# --- run --------------------------------------------------------------------------------------------------------------


def run(
    train_loop_per_worker: Callable[..., object],
    train_loop_config: Mapping[str, Any] | None = None,
    *,
    workers: int | tuple[int, int] | None = None,
    scaling_config: Any = None,
    run_config: Any = None,
    options: Sequence[str] = (),
) -> Result:
    """Train on the nodes of a Ray cluster until the function has returned on all workers.

    The cluster is the one to which this process is connected. Without a connection this calls `ray.init()`, which
    takes the cluster of RAY_ADDRESS or of this machine, or starts one. Hosts join and leave meanwhile as in
    `farandole run --pool ray`. The run's output appears on standard output. Ctrl-C ends the run with a checkpoint.

    Args:
        train_loop_per_worker: the function that trains. It has the same contents as a training script: it calls
            `farandole.join()` and has the loop. It gets `train_loop_config` as its argument, or none if it takes none.
        train_loop_config: the argument of the function.
        workers: the most workers, or (fewest, most); short for `ScalingConfig(num_workers=...)`.
        scaling_config: a `ScalingConfig`, of this module or of `ray.train`.
        run_config: a `RunConfig`, of this module or of `ray.train`.
        options: further options of `farandole run`, such as ("--checkpoint-every", "10m").

    Raises:
        UsageError: a field has a value that farandole does not support, or the function can't be stored.
        TrainingFailed: the run did not finish: it failed, or it was stopped. The message has the reason and the
            run's folder. The same call continues the run.
        KeyboardInterrupt: after Ctrl-C, when the run has ended.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"ray is not installed; {how_to_install('ray')}, in the cluster's version of ray")
    if workers is not None:
        if scaling_config is not None:
            raise UsageError("workers and scaling_config are both given; give the number in one of them")
        scaling_config = ScalingConfig(num_workers=workers)
    scaling = _supported(scaling_config, ScalingConfig, "scaling_config")
    config = _supported(run_config, RunConfig, "run_config")
    name = config.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{getattr(train_loop_per_worker, '__name__', 'train')}"
    if "://" in str(config.storage_path):
        raise UsageError(
            f"run_config: storage_path={config.storage_path!r} is a URL; the run's folder is a local one, and "
            f'options=("--checkpoints", URL) stores the checkpoints elsewhere'
        )
    folder = Path(config.storage_path or STORAGE).expanduser().absolute() / name
    pool, fewest = _pool_options(scaling)
    stored = _stored(train_loop_per_worker, train_loop_config)
    address, here = _connect()
    listen = [] if listener.is_loopback(here) else ["--listen", here]  # the last of two options counts
    words = ["--pool", f"{pool},address={address}", "--min", str(fewest), *listen, "--folder", str(folder), *options]
    with tempfile.TemporaryDirectory(prefix="farandole-") as program:
        _write_program(Path(program), folder, stored)
        code = _show(["run", *words, SCRIPT], program)
    return _result(folder, code)


def _supported(given: Any, kind: type[Any], where: str) -> Any:
    """Return the fields of `given`, an object of `kind` or of Ray Train's class of that name, as a `kind`.

    Raises:
        UsageError: another field has a value that is not its default.
    """
    if given is None or isinstance(given, kind):
        return given or kind()
    names = {field.name for field in dataclasses.fields(kind)}
    if not dataclasses.is_dataclass(given) or isinstance(given, type) or not names <= vars(given).keys():
        raise UsageError(f"{where}: {given!r} is no {kind.__name__}")
    plain = type(given)()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if field.name not in names and value != getattr(plain, field.name):
            raise UsageError(
                f"{where}: {field.name}={value!r} is not supported; leave it out ({', '.join(sorted(names))} are)"
            )
    return kind(**{name: getattr(given, name) for name in names})


def _pool_options(scaling: ScalingConfig) -> tuple[str, int]:
    """Return the pool as `farandole run --pool` takes it, without the cluster's address, and the fewest workers.

    Raises:
        UsageError: an amount or a number has a value that is not supported.
    """
    fewest, most = (1, scaling.num_workers) if isinstance(scaling.num_workers, int) else scaling.num_workers
    if not 1 <= fewest <= most:
        raise UsageError(f"num_workers={scaling.num_workers!r}: give a number from 1, or (fewest, most)")
    resources = dict(scaling.resources_per_worker or {})
    if scaling.use_gpu:
        resources.setdefault("GPU", 1)
    pool = {"size": str(most), "slots": "1"}
    for key, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        amount = resources.pop(resource, None)
        if amount is not None and (amount or resource == "CPU"):  # no GPU is the default
            pool[key] = f"{amount:g}"
    if resources:
        pool["resources"] = "+".join(f"{name}:{amount:g}" for name, amount in resources.items())
    if scaling.label_selector:
        pool["label"] = "+".join(f"{key}:{value}" for key, value in scaling.label_selector.items())
    parse(pool, "scaling_config")
    return ",".join(("ray", *(f"{key}={value}" for key, value in pool.items()))), fewest


def _connect() -> tuple[str, str]:
    """Connect to the cluster, if this process is not connected.

    Returns its address as HOST:PORT, and the address of this machine in its network.
    """
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init()
    context = ray.get_runtime_context()
    here = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    return context.gcs_address, here


def _write_program(program: Path, run_folder: Path, stored: bytes) -> None:
    """Write the working folder of the run: the files of this working folder, the function, and a script that calls it.

    The packing of the run withholds secrets, as it does for any script.
    """
    here = Path.cwd().resolve()
    chosen = listing(here, run=run_folder)
    check_sizes(chosen)
    for name in (*chosen.names, *chosen.secrets, *chosen.astray):
        target = program / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (here / name).is_symlink():
            target.symlink_to(link(here, name) or os.path.realpath(here / name))
        else:
            with contextlib.suppress(FileNotFoundError):  # it disappeared meanwhile
                shutil.copy2(here / name, target)
    folders = [Path(entry).resolve() for entry in sys.path[:1] if entry]  # the folder of the driver's script
    inside = [str(entry.relative_to(here)) for entry in folders if entry.is_relative_to(here)]
    (program / SCRIPT).write_text(WORKER.format(folders=inside, stored=FUNCTION))
    (program / FUNCTION).write_bytes(stored)


def _stored(function: Callable[..., object], config: Mapping[str, Any] | None) -> bytes:
    """Return the function and its arguments as Ray's cloudpickle stores them. Raises UsageError: it can't."""
    arguments = (dict(config or {}),) if config is not None or _takes_one(function) else ()
    try:
        return importlib.import_module("ray.cloudpickle").dumps((function, arguments))
    except Exception as error:
        raise UsageError(
            f"the training function or its configuration can't be stored ({type(error).__name__}: {error}); create "
            f"data sets, locks and connections within the function"
        ) from error


def _takes_one(function: Callable[..., object]) -> bool:
    """Return True if the function has a parameter without a default."""
    return any(each.default is each.empty for each in inspect.signature(function).parameters.values())


def _show(words: Sequence[str], program: str) -> int:
    """Run a command of farandole in the folder `program` and print its output. Returns its exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the command has ended.
    """
    command = [sys.executable, "-c", STARTER, str(os.getpid()), "-m", "farandole", *words]
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(
        command, cwd=program, env={**of_other_hosts(os.environ), "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        while True:
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                process.wait()
            except KeyboardInterrupt as pressed:
                interrupt = pressed
                process.send_signal(signal.SIGINT)
            except BaseException:  # SystemExit by Ray's handler of SIGTERM, or an output that can't be written
                process.terminate()
                raise
            else:
                break
    if interrupt is not None:
        raise interrupt
    return process.returncode


def _result(folder: Path, code: int) -> Result:
    """Return the result of a run that ended with the exit code `code`.

    Raises:
        TrainingFailed: the run did not finish.
    """
    over = past(folder.name, _lines(folder))
    if code or over.outcome != "finished":  # `farandole stop` and `--max-hours` end a run with code 0
        reason = over.reason if over.code is not None else "its reason is in the output above"
        raise TrainingFailed(f"the run did not finish (exit code {code}): {reason}; its folder is {folder}")
    metrics = dict[str, Any]()
    for _, values in _metrics(folder):
        metrics.update(values)
    checkpoint = Checkpoint(path=over.checkpoint) if over.checkpoint else None
    return Result(metrics=metrics, checkpoint=checkpoint, path=str(folder))
