"""The fork server: a process that has loaded torch and the modules of a worker, and forks the workers of its host.

    python -m farandole.worker.fork_server CHANNEL LIFELINE MODULE ...

The imports of a worker cost 3 s of CPU and 250 MB; a forked worker costs 0.1 s and 40 MB. CHANNEL is the descriptor of
a socket whose other end sends requests. LIFELINE is the descriptor of the pipe that ends this process
(`platform/process.py` explains the protocol).

Invariant: a forked process has the same state as a new interpreter with the same command line, folder and environment.
So this process starts no thread, no parallel region and no CUDA, handles no signal, draws no random number, and prints
nothing. It verifies that (`unfit`) after all modules are loaded, because a sitecustomize or a .pth file may have
started anything. The state that forking copies is renewed: the random state of Python, NumPy and torch, and
multiprocessing's key. One difference remains: string hashes, which are random for each interpreter, are those of this
process.

The first optimizer imports half of torch again (torch._dynamo), so one is built here. `gc.freeze` prevents the garbage
collector from touching, and so copying, the shared memory.
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

REPARENTED_S = 0.0005  # polling interval for the new parent process
_FLAGS = ("inspect", "interactive", "verbose", "dev_mode", "debug")


def main() -> None:
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    channel.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    load(sys.argv[3:])
    send(channel, {"unfit": unfit()})
    request = serve(channel, lifeline)  # returns in the forked process
    end(lambda: become(request))


def load(modules: Sequence[str]) -> None:
    """Import the modules, and build an optimizer. The garbage collector would take a tenth of the time."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
        if module.endswith(".__main__"):  # only its imports are needed: it is executed again, as the main module
            del sys.modules[module]
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.collect()
    gc.freeze()
    gc.enable()


def unfit() -> str:
    """Returns the reason why a forked process would differ from a new interpreter; "" if it would not."""
    flags = [name for name in _FLAGS if getattr(sys.flags, name)] + sorted(sys._xoptions)  # pyright: ignore[reportPrivateUsage]
    if flags:
        return f"the interpreter has special flags ({', '.join(flags)})"
    if sys.gettrace() or sys.getprofile() or tracemalloc.is_tracing():
        return "a debugger, profiler or tracemalloc is active"
    if torch.cuda.is_initialized() or any("/dev/nvidia" in file for file in _open_files()):
        return "CUDA is in use as soon as Python starts"
    if children := _children():
        return f"child processes exist as soon as Python starts ({', '.join(children)})"
    if (trial := os.fork()) == 0:
        os._exit(0)
    os.waitpid(trial, 0)  # the fork ended threads that have fork handlers, such as OpenBLAS's
    if len(os.listdir("/proc/self/task")) > 1:
        return "threads are running as soon as Python starts"
    return ""


def _open_files() -> list[str]:
    return [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]


def _children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def serve(channel: socket.socket, lifeline: int) -> dict[str, Any]:
    """Forks a process for each request, and returns the request in the new process.

    In the server it does not return: the process ends when the other end of `channel` is closed.
    """
    while True:
        request, descriptors = receive(channel)
        if request is None:
            os._exit(0)
        reading, writing = os.pipe()
        between = _fork_twice()
        if between:
            channel.close()
            os.close(lifeline)
            os.close(reading)
            return _begin(request, descriptors, between, writing)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        with open(reading, "rb") as answer:
            send(channel, json.loads(answer.read() or b'{"error": "the fork failed, or the process ended at once"}'))


def _fork_twice() -> int:
    """Forks twice. Returns the pid of the intermediate process in the new one; 0 here, after that one has ended."""
    try:
        if between := os.fork():
            os.waitpid(between, 0)
            return 0
    except OSError:  # no memory, or too many processes: no answer was written
        return 0
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        return between
    except OSError:
        os._exit(1)


def _begin(request: dict[str, Any], descriptors: Sequence[int], between: int, answer: int) -> dict[str, Any]:
    """Initialises the new process. It reports its pid when everything that the requester relies on is in place."""
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
        os.chdir(request["folder"])
        while os.getppid() == between:
            time.sleep(REPARENTED_S)
    except OSError as error:
        os.write(answer, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    _make_anew(request)
    os.write(answer, json.dumps({"pid": os.getpid()}).encode())
    os.close(answer)
    return _with_spare(request) if request["spare"] else request


def _make_anew(request: dict[str, Any]) -> None:
    """Renews the state that forking has copied, and repeats what an interpreter does at its start."""
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    if "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore
    np.random.seed()
    torch.default_generator.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = request["folder"]  # pyright: ignore
    output.show_command([sys.executable, *request["words"]], os.environ)


def _with_spare(request: dict[str, Any]) -> dict[str, Any]:
    """Forks a server for this process, before it gets a state that can't be forked."""
    ours, theirs = socket.socketpair()
    lifeline = Lifeline()
    server = os.fork()
    if server:
        theirs.close()
        lifeline.handed_over()
        process.keep_spare(ForkServer(Forked(server), ours, lifeline), os.environ)
        return request
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


def become(request: dict[str, Any]) -> None:
    """Executes the request as `python WORDS` does."""
    words: list[str] = request["words"]
    sys.orig_argv = [sys.executable, *words]
    sys.modules["__main__"] = types.ModuleType("__main__")
    module = words[1] if words[0] == "-m" else ""
    sys.argv = words[1:] if module else words
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = request["folder"] if module else os.path.dirname(os.path.realpath(words[0]))
    if module:
        runpy._run_module_as_main(module)  # pyright: ignore
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(run: Callable[[], None]) -> NoReturn:
    """Calls `run`, and ends the process like an interpreter, without its teardown, which would copy shared memory."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        else:
            code = exit_.code or 0
    except BaseException as error:  # noqa: BLE001  an error of the program
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
