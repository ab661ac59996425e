"""The worker process: runs the user's script as `__main__`, and reports to the coordinator how it ends.

SIGTERM, SIGINT and SIGHUP are preemption notices (SIGHUP only if it is not ignored from the start, as by nohup): the
worker leaves gracefully between two steps, whatever handlers the script sets (`worker/process_exit.py`). A cloud's
preemption notice for this machine (`noticed`) does the same, and has a deadline. The process ends by `os._exit` after
its exit handlers, because a thread of an abandoned view may still wait for a frozen peer and can't be woken. Exceptions
of exit handlers, or of closed streams, are ignored then.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

import farandole
from farandole import joining
from farandole.code import snapshot
from farandole.control import ticket as tickets
from farandole.control.run_folder import HIDDEN_LOG_PREFIX
from farandole.errors import (
    CoordinatorUnreachable,
    FarandoleError,
    ProtocolError,
    ShardError,
    UsageError,
    WorkerSuperseded,
)
from farandole.numerics import settings as numeric_settings
from farandole.platform.output import say
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE, EXIT_EVICTED
from farandole.protocol.messages import DataUnavailable, HostPreemption, ScriptFailed
from farandole.protocol.values import FAILURES
from farandole.run import Run
from farandole.settings import OF_LAUNCHERS, Settings, leave_launcher
from farandole.training.loop import use
from farandole.worker import process_exit
from farandole.worker.connection import Connected
from farandole.worker.process_exit import ScriptSignals

_log = logging.getLogger(__name__)
_preemption: tuple[str, float] | None = None  # why this machine stops, and when (seconds since the epoch)

NO_PROCESS_GROUP = (
    "farandole: the script calls torch.distributed, which has no process group here. The workers of a run exchange "
    "gradients by themselves: remove the call. For a value over the global batch use step.mean(...) or step.sum(...), "
    "and for an evaluation run.evaluate(...)"
)
NO_LAUNCHER = (
    "farandole: the script reads {}, which torchrun sets. Workers come and go, so none has a fixed rank: use "
    "run.device for the device, run.is_leader where rank 0 prints, and run.once() for what one worker does"
)
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_script(ticket: str, script: str, args: list[str]) -> NoReturn:
    """Run `script` with `args` as a worker of the ticket's run, and end the process with the worker's exit code.

    Raises:
        UsageError: there is no such script.
    """
    if names := leave_launcher(os.environ):
        _log.warning("removed variables of another launcher from this worker's environment: %s", ", ".join(names))
    settings = Settings.read()
    copies = settings.code
    if not settings.pool:
        process_exit.come_back(ticket, settings.returns)
    os.environ["FARANDOLE_TICKET"] = ticket
    executed = snapshot.install(script, Path(copies) if copies else None)
    if not copies and not Path(executed.file).is_file():
        raise UsageError(f"{script}: no such script; give the path of a Python file, or a module's name")
    sys.argv = [executed.file, *args]
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals = ScriptSignals({n: _notice for n in NOTICES if n is not signal.SIGHUP or not ignored})
    os.register_at_fork(before=_hold_notices, after_in_parent=_take_notices, after_in_child=_no_notices)
    code = 1
    try:
        code = _run(script, executed)
        signals.call_noted()
    finally:
        _end(code)


def _end(code: int) -> NoReturn:
    """Run exit handlers and flush streams, which `os._exit` does not do, then end the process.

    An exception of these, or a second signal, does not change the exit code.
    """
    try:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for name in ("stdout", "stderr"):
            with contextlib.suppress(BaseException):
                getattr(sys, name).flush()
    finally:
        process_exit.leave(code)


def tell_failure(ticket: str, text: str) -> None:
    """Report to the coordinator why this worker can't join, before any script has begun."""
    os.environ["FARANDOLE_TICKET"] = ticket
    _fail(ScriptFailed(traceback=text))


def run_alone(script: str, args: list[str], copies: Path | None = None) -> Run:
    """Run `script` with `args` to its end in this single process (`world_size=1`), and return its run.

    `copies`: the folder with a run's copies of the script, None to run the file itself.

    Raises:
        UsageError: the script never joined a run.
        BaseException: any exception of the script itself.
    """
    executed = snapshot.install(script, copies)
    sys.argv = [executed.file, *args]
    try:
        executed.run()
    except SystemExit as exit_:
        if _code(exit_) != 0:
            raise
    except RuntimeError as error:
        if (explained := numeric_settings.explained(error)) is error:
            raise
        raise explained from error
    return _joined(script)


def show_help(script: str, args: list[str]) -> None:
    """Run `script` with `args`, which ask for its help, in this process. It can't train.

    Raises:
        UsageError: the script does not end by it, and goes on to train.
        SystemExit: the script has exited, or has failed before it could show its help.
    """

    def refuse(*arguments: object, **options: object) -> NoReturn:
        del arguments, options
        raise UsageError(
            f"{script} {' '.join(args)}: the script shows no help and goes on to run.steps(...); the options of "
            f"farandole are shown by `farandole run --help`"
        )

    os.environ |= dict.fromkeys(("FARANDOLE_TICKET", "FARANDOLE_FOLDER", "FARANDOLE_HISTORY"), "")
    use(refuse)
    executed = snapshot.install(script, None)
    sys.argv = [executed.file, *args]
    try:
        executed.run()
    except FarandoleError:
        raise
    except Exception as error:  # noqa: BLE001  any exception of the script is shown
        say(traceback_of(error, executed.file))
        sys.exit(1)


def _joined(script: str) -> Run:
    """Return the run that the script has joined. Raises UsageError if there is none."""
    run = joining.current()
    if run is None:
        raise UsageError(f"{script} ended without a call of farandole.join(), so it has trained nothing")
    return run


def _run(script: str, executed: snapshot.Sources) -> int:
    """Run the script, and report how it ends. Returns the process's exit code."""
    try:
        try:
            _execute(executed)
            _joined(script).finish()
        except SystemExit as exit_:
            run = joining.current()
            if run is None and not _comes_from_us(exit_):
                return _fail(_exited(exit_, "before it called farandole.join()"))
            if run is None or run.dismissed:
                return _dismissed(exit_)
            if _code(exit_) == 0:
                run.finish()
            raise
    except SystemExit as exit_:
        run = joining.current()
        if run is not None and run.dismissed:
            return _dismissed(exit_)
        return _fail(_exited(exit_, f"in {_where(exit_, executed.file)}"))
    except BaseException as raised:  # noqa: BLE001  any exception of the script is reported to the run
        error = numeric_settings.explained(raised)
        if isinstance(error, WorkerSuperseded):  # the run continues with another process in this one's place
            say(f"farandole: {error}")
            return EXIT_EVICTED
        if isinstance(error, FarandoleError) and not isinstance(error, ProtocolError):  # the message is complete
            data_unavailable = isinstance(error, ShardError)
            text = _innermost(str(error)) if data_unavailable else str(error)
            say(f"farandole: error: {text}")
            _put_aside(traceback.format_exc())
            if isinstance(error, CoordinatorUnreachable):
                return 1  # no coordinator can receive a report
            return _fail(DataUnavailable(reason=text) if data_unavailable else ScriptFailed(traceback=text))
        text = traceback_of(error, executed.file)
        if Settings.read().pool:  # the command that runs the run prints it
            _put_aside("".join(traceback.format_exception(error)).rstrip())
        else:
            say(text)
        return _fail(ScriptFailed(traceback=text))
    return 0


def _exited(exit_: SystemExit, where: str) -> ScriptFailed:
    """Return the report that the script called `sys.exit`, as argparse does after wrong arguments."""
    if isinstance(exit_.code, str):
        print(exit_.code, file=sys.stderr)  # as Python does
    code = _code(exit_)
    return ScriptFailed(traceback=f"the script exited with code {code} {where}", code=code if code in FAILURES else 1)


def _where(error: BaseException, file: str) -> str:
    """Return the script's line at which `error` was raised, or which has called what raised it."""
    lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f"{file}, line {lines[-1]}" if lines else file


# --- traceback --------------------------------------------------------------------------------------------------------
#
# A traceback for users: from the script's own frame on, and without frames of farandole and torch that only lead to
# other code, such as those between a call of a module and its `forward`. Where such a package raises the exception
# itself, its last frames stay. The worker's log has the whole traceback.

_INNER = (*(os.path.dirname(package.__file__ or "") + os.sep for package in (farandole, torch)), "<frozen ")


def traceback_of(error: BaseException, file: str) -> str:
    """Return the traceback of an exception of the script in `file` for users, after a hint if there is one."""
    whole = traceback.TracebackException.from_exception(error)
    chain = [whole]
    for each in chain:
        each.stack[:] = _users_frames(each, file)
        linked = (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ()))
        chain += [other for other in linked if other is not None]
    text = "".join(whole.format()).rstrip()
    hint = _hint(error)
    return f"{hint}\n{text}" if hint else text


def _users_frames(raised: traceback.TracebackException, file: str) -> list[traceback.FrameSummary]:
    frames = list(raised.stack)
    start = next((number for number, frame in enumerate(frames) if frame.filename == file), 0)
    not_inner = [number for number, frame in enumerate(frames) if not frame.filename.startswith(_INNER)]
    end = max(not_inner, default=-1)  # later frames are those of the package that raised it
    if hasattr(raised, "lineno"):  # a SyntaxError: the place of the error follows the frames
        end = len(frames)
    return [frame for number, frame in enumerate(frames) if number >= start and (number > end or number in not_inner)]


def _hint(error: BaseException) -> str:
    """Return what to write instead, for what a script takes from torchrun; "" if it is none of that."""
    text = str(error)
    if "Default process group has not been initialized" in text or "env:// rendezvous" in text:
        return NO_PROCESS_GROUP
    variable = error.args[0] if isinstance(error, KeyError) and error.args else None
    return NO_LAUNCHER.format(variable) if OF_LAUNCHERS.fullmatch(str(variable)) else ""


def _comes_from_us(exit_: SystemExit) -> bool:
    """Return True if `farandole.join()` has raised it, because the coordinator has dismissed this worker."""
    last = exit_.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "farandole"


def _dismissed(exit_: SystemExit) -> int:
    """Report the exit that the coordinator has requested. Returns the exit code."""
    if run := joining.current():
        run.last_word()
    return _code(exit_)


def _put_aside(text: str) -> None:
    """Print `text` as hidden lines of the worker's log file; do nothing if the worker has no log file."""
    if Settings.read().pool:
        print(*(HIDDEN_LOG_PREFIX + line for line in text.splitlines()), sep="\n", file=sys.stderr)


def _execute(executed: snapshot.Sources) -> None:
    """Run the script. A forked child of the script ends here, because only the worker does what follows."""
    worker = os.getpid()
    try:
        executed.run()
    except BaseException as error:
        if os.getpid() != worker:
            _leave_child(error)
        raise
    if os.getpid() != worker:
        _leave_child(SystemExit(0))


def _leave_child(error: BaseException) -> NoReturn:
    """End a forked child without the worker's exit handlers, and without destroying objects that own its sockets."""
    with contextlib.suppress(OSError, ValueError):
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_code(error) if isinstance(error, SystemExit) else 1)


def _innermost(text: str) -> str:
    """Return the message of an error from a loader process, without that process's traceback."""
    return re.split(r"^farandole\.errors\.\w+: ", text, flags=re.MULTILINE)[-1].strip()


def _fail(failure: ScriptFailed | DataUnavailable) -> int:
    """Report the script's exception to the coordinator, even if the script had not joined; wait to be dismissed.

    Returns the exit code.
    """
    run = joining.current()
    try:
        if run is not None:
            run.fail(failure)
        else:
            settings = Settings.read()
            context = Connected(tickets.load(settings.ticket), settings)
            context.tell(failure)
            context.close()
    except SystemExit as exit_:
        return _code(exit_)
    except FarandoleError as error:
        say(f"farandole: error: {error}")
        return 1
    return EXIT_DATA_UNAVAILABLE if isinstance(failure, DataUnavailable) else 1


def _code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    return exit_.code if isinstance(exit_.code, int) else 1


def _hold_notices() -> None:
    """Block the signals before a fork: a child may receive one before it has removed the handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _take_notices() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


def _no_notices() -> None:
    """Reset the signal handlers in a forked child, which is not a worker, to the defaults."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _take_notices()


def _notice(number: int, frame: FrameType | None) -> None:
    """Signal handler: the worker leaves gracefully, with the deadline of a preemption notice if there is one."""
    del frame
    run = joining.current()
    if run is None:
        raise SystemExit(0)  # not in any view yet, so no agreement is necessary
    reason, stops_at = _preemption or (signal.Signals(number).name, None)
    run.notice(reason, None if stops_at is None else max(stops_at - time.time(), 0.0))


def noticed(notified: HostPreemption | None) -> None:
    """Handle a cloud's preemption notice for this machine. Any thread may call it.

    Rebalance advice, and a notice that is withdrawn (None), are only logged. Before the worker has joined, this sends
    SIGTERM to the own process, because only the main thread can end the script then.
    """
    global _preemption
    if notified is None or notified.advice:
        _log.warning(
            "%s; this worker stays", notified.reason if notified else "this machine's preemption notice was withdrawn"
        )
        return
    _log.warning("%s: this worker leaves", notified.reason)
    _preemption = (notified.reason, notified.at)
    run = joining.current()
    if run is None:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        run.notice(notified.reason, max(notified.at - time.time(), 0.0))
