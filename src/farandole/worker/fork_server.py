"""A process that has loaded torch and what a worker imports, and forks the workers of its host from itself.

    python -m farandole.worker.fork_server CHANNEL LIFELINE MODULE ...

A worker costs 3 s of CPU and 250 MB for its imports, one that is forked 0.1 s and 40 MB. CHANNEL is the descriptor of a
socket whose other end asks, LIFELINE that of what ends this process (`platform/process.py` says who knows what when).

Invariant: what is forked has what a new interpreter with the same command line, folder and environment would have. So
this process starts no thread, no parallel region and no CUDA, handles no signal, draws no random number, and prints
nothing. It looks whether that is so (`unfit`) when all is loaded: a sitecustomize, or a .pth file, may have started
anything. What forking itself copies is made anew: the random state of Python, NumPy and torch, multiprocessing's key.
Left as it is: the hashes of strings, which are random from one interpreter to the next.

The first optimizer imports half of torch once more (torch._dynamo), so one is built here. `gc.freeze` keeps the
collector from touching, and so copying, what is shared.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import socket
import sys
import threading
import time
import tracemalloc
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from farandole.platform import output, process
from farandole.platform.process import Forked, ForkServer, Lifeline, hang_on, is_cut, receive, send

REPARENTED_S = 0.0005  # between two looks
_FLAGS = ("inspect", "interactive", "verbose", "dev_mode", "debug")


def main() -> None:
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    channel.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    load(sys.argv[3:])
    send(channel, {"unfit": unfit()})
    asked = serve(channel, lifeline)  # returns in what is forked
    end(lambda: become(asked))


def load(modules: Sequence[str]) -> None:
    for told in modules:
        importlib.import_module(told)
        if told.endswith(".__main__"):  # what it imports is meant: it is executed again, as the main module
            del sys.modules[told]
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.collect()
    gc.freeze()


def unfit() -> str:
    """Why a process forked from this one would not be what a new one is, in words; "" if it would."""
    flags = [name for name in _FLAGS if getattr(sys.flags, name)] + sorted(sys._xoptions)  # pyright: ignore[reportPrivateUsage]
    if flags:
        return f"the interpreter has other flags ({', '.join(flags)})"
    if sys.gettrace() or sys.getprofile() or tracemalloc.is_tracing():
        return "something traces what it executes"
    if torch.cuda.is_initialized() or any("/dev/nvidia" in file for file in _open_files()):
        return "CUDA is in use as soon as Python starts"
    if children := _children():
        return f"processes are started as soon as Python starts ({', '.join(children)})"
    if (trial := os.fork()) == 0:
        os._exit(0)
    os.waitpid(trial, 0)  # by now threads have ended that see to forks themselves, such as OpenBLAS's
    if len(os.listdir("/proc/self/task")) > 1:
        return "threads are running as soon as Python starts"
    return ""


def _open_files() -> list[str]:
    return [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]


def _children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def serve(channel: socket.socket, lifeline: int) -> dict[str, Any]:
    """Fork what is asked for. Returns, in each of those, what it is to be; ends when nobody can ask any more."""
    while True:
        asked, descriptors = receive(channel)
        if asked is None:
            os._exit(0)
        reading, writing = os.pipe()
        between = _fork_twice()
        if between:
            channel.close()
            os.close(lifeline)
            os.close(reading)
            return _begin(asked, descriptors, between, writing)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        with open(reading, "rb") as answer:
            send(channel, json.loads(answer.read() or b'{"error": "no process could be forked, or it ended at once"}'))


def _fork_twice() -> int:
    """In the new process: the number of the one in between. Here: 0, when that one has ended."""
    try:
        if between := os.fork():
            os.waitpid(between, 0)
            return 0
    except OSError:  # no memory, too many processes: nobody has written an answer
        return 0
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        return between
    except OSError:
        os._exit(1)


def _begin(asked: dict[str, Any], descriptors: Sequence[int], between: int, answer: int) -> dict[str, Any]:
    """In the new process. Its parent hears of it when nothing that it has to rely on is missing."""
    try:
        *streams, read_end = descriptors
        os.setsid()
        hang_on(read_end, os.getpid())
        if is_cut(read_end):
            os._exit(1)
        os.set_inheritable(read_end, True)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(asked["folder"])
        while os.getppid() == between:
            time.sleep(REPARENTED_S)
    except OSError as error:
        os.write(answer, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    _make_anew(asked)
    os.write(answer, json.dumps({"pid": os.getpid()}).encode())
    os.close(answer)
    return _with_spare(asked) if asked["spare"] else asked


def _make_anew(asked: dict[str, Any]) -> None:
    """What forking has copied, and what an interpreter does when it starts."""
    os.environ.clear()
    os.environ.update(asked["environ"])
    time.tzset()
    if "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]  # pyright: ignore
    output.show_command([sys.executable, *asked["words"]], os.environ)


def _with_spare(asked: dict[str, Any]) -> dict[str, Any]:
    """This process gets a server of its own, before it is anything that could not be forked any more."""
    ours, theirs = socket.socketpair()
    lifeline = Lifeline()
    server = os.fork()
    if server:
        theirs.close()
        lifeline.handed_over()
        process.keep_spare(ForkServer(Forked(server), ours, lifeline), os.environ)
        return asked
    ours.close()
    lifeline.cut()
    os.setsid()
    hang_on(lifeline.read_end, os.getpid())
    output.show_command([sys.executable, "-m", "farandole.worker.fork_server"], os.environ)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    send(theirs, {"unfit": ""})
    return serve(theirs, lifeline.read_end)


def become(asked: dict[str, Any]) -> None:
    """What `python WORDS` does."""
    words: list[str] = asked["words"]
    sys.orig_argv = [sys.executable, *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    module = words[1] if words[0] == "-m" else ""
    sys.argv = words[1:] if module else words
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = asked["folder"] if module else os.path.dirname(os.path.realpath(words[0]))
    if module:
        runpy._run_module_as_main(module)  # pyright: ignore
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(run: Callable[[], None]) -> NoReturn:
    """`run`, and end as an interpreter does, but for tearing down what is shared: that would touch, and so copy it."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        else:
            code = exit_.code or 0
    except BaseException as error:  # noqa: BLE001  it is the program's
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        threading._shutdown()  # pyright: ignore
        atexit._run_exitfuncs()  # pyright: ignore
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
