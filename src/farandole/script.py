"""A worker's process: runs the user's script as `__main__` and answers for how it ends.

SIGTERM, SIGINT and SIGHUP (unless it is ignored from the start, as by nohup) are notices: the worker leaves gracefully
between two steps, whatever handlers the script sets (`worker/departure.py`). So is what a cloud says of this
machine (`noticed`), and that has a deadline. The process ends by `os._exit` after its exit handlers, because a thread
of an abandoned view may still wait on a frozen peer and can't be woken. What they, or closed streams, raise by then
changes nothing.
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

from farandole import joining
from farandole.code import snapshot
from farandole.control import ticket as tickets
from farandole.control.run_folder import ASIDE
from farandole.errors import CoordinatorUnreachable, FarandoleError, ProtocolError, RunEnded, ShardError, UsageError
from farandole.numerics import settings as cuda
from farandole.platform.output import say
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE, EXIT_EVICTED
from farandole.protocol.messages import DataUnavailable, HostPreemption, ScriptFailed
from farandole.run import Run
from farandole.settings import Settings, leave_launcher
from farandole.worker import departure
from farandole.worker.connection import Connected
from farandole.worker.departure import ScriptSignals

_log = logging.getLogger(__name__)
_told: tuple[str, float] | None = None  # why this machine goes, and when

NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_script(ticket: str, script: str, args: list[str]) -> NoReturn:
    """Run `script` with `args` as a worker of the ticket's run, and end the process with the worker's exit code.

    Raises:
        UsageError: there is no such script.
    """
    if names := leave_launcher(os.environ):
        _log.warning("taken out of this worker's environment, since workers come and go: %s", ", ".join(names))
    settings = Settings.read()
    copies = settings.code
    if not copies and not Path(script).is_file():
        raise UsageError(f"{script}: there is no such script; give the path of a Python file")
    if not settings.pool:
        departure.come_back(ticket, settings.returns)
    os.environ["FARANDOLE_TICKET"] = ticket
    sys.argv = [script, *args]
    executed = snapshot.install(script, Path(copies) if copies else None)
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
    """What `os._exit` leaves out comes first; whatever that raises, and a second signal, change nothing any more."""
    try:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for name in ("stdout", "stderr"):
            with contextlib.suppress(BaseException):
                getattr(sys, name).flush()
    finally:
        departure.leave(code)


def tell_failure(ticket: str, text: str) -> None:
    """Tell the coordinator why this worker can't join, before any script has begun."""
    os.environ["FARANDOLE_TICKET"] = ticket
    _fail(ScriptFailed(traceback=text))


def run_alone(script: str, args: list[str], copies: Path | None = None) -> Run:
    """Run `script` with `args` to its end as a world of one in this process, and give its run. `copies` are a run's.

    Raises:
        UsageError: it never joined a run. And whatever the script itself raises.
    """
    sys.argv = [script, *args]
    try:
        snapshot.install(script, copies).run()
    except SystemExit as exit_:
        if _code(exit_) != 0:
            raise
    except RuntimeError as error:
        if (told := cuda.explained(error)) is error:
            raise
        raise told from error
    return _joined(script)


def _joined(script: str) -> Run:
    run = joining.current()
    if run is None:
        raise UsageError(f"{script} ended without ever calling farandole.join(), so it has trained nothing")
    return run


def _run(script: str, executed: snapshot.Sources) -> int:
    try:
        try:
            _execute(executed)
            _joined(script).finish()
        except SystemExit as exit_:
            run = joining.current()
            if run is None or run.dismissed:
                return _let_go(exit_)
            if _code(exit_) == 0:
                run.finish()
            raise
    except SystemExit as exit_:
        run = joining.current()
        if run is not None and run.dismissed:
            return _let_go(exit_)
        return _fail(ScriptFailed(traceback=traceback.format_exc()))
    except BaseException as raised:  # noqa: BLE001  whatever the script raises is the run's business
        error = cuda.explained(raised)
        if isinstance(error, RunEnded):  # this process is no use any more; the run goes on, with another
            say(f"farandole: {error}")
            return EXIT_EVICTED
        if isinstance(error, FarandoleError) and not isinstance(error, ProtocolError):  # it says all there is to say
            unfed = isinstance(error, ShardError)
            text = _innermost(str(error)) if unfed else str(error)
            say(f"farandole: error: {text}")
            _put_aside(traceback.format_exc())
            if isinstance(error, CoordinatorUnreachable):
                return 1  # there is nobody to tell
            return _fail(DataUnavailable(reason=text) if unfed else ScriptFailed(traceback=text))
        say(traceback.format_exc().rstrip())
        return _fail(ScriptFailed(traceback=traceback.format_exc()))
    return 0


def _let_go(exit_: SystemExit) -> int:
    if run := joining.current():
        run.last_word()
    return _code(exit_)


def _put_aside(text: str) -> None:
    """For the worker's log alone; a worker without one leaves it out."""
    if Settings.read().pool:
        print(*(ASIDE + line for line in text.splitlines()), sep="\n", file=sys.stderr)


def _execute(executed: snapshot.Sources) -> None:
    """Run the script. A child that it has forked ends here: what is left to do is the worker's."""
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
    """Without exit handlers, which are the worker's, and without destroying what holds the worker's sockets."""
    with contextlib.suppress(OSError, ValueError):
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_code(error) if isinstance(error, SystemExit) else 1)


def _innermost(text: str) -> str:
    """Without the traceback of the loader process that it comes from."""
    return re.split(r"^farandole\.errors\.\w+: ", text, flags=re.MULTILINE)[-1].strip()


def _fail(told: ScriptFailed | DataUnavailable) -> int:
    """Tell the coordinator what the script raised, even if it had not joined yet; wait to be let go."""
    run = joining.current()
    try:
        if run is not None:
            run.fail(told)
        else:
            settings = Settings.read()
            participant = Connected(tickets.load(settings.ticket), settings)
            participant.tell(told)
            participant.close()
    except SystemExit as exit_:
        return _code(exit_)
    except FarandoleError as error:
        say(f"farandole: error: {error}")
        return 1
    return EXIT_DATA_UNAVAILABLE if isinstance(told, DataUnavailable) else 1


def _code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    return exit_.code if isinstance(exit_.code, int) else 1


def _hold_notices() -> None:
    """A child may be sent a signal before it is known to be one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _take_notices() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


def _no_notices() -> None:
    """A forked child is no worker: the signals do to it what they do to any process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _take_notices()


def _notice(number: int, frame: FrameType | None) -> None:
    del frame
    run = joining.current()
    if run is None:
        raise SystemExit(0)  # not in any view yet: nobody needs to agree
    reason, goes_at = _told or (signal.Signals(number).name, None)
    run.notice(reason, None if goes_at is None else max(goes_at - time.time(), 0.0))


def noticed(notified: HostPreemption | None) -> None:
    """What a cloud says of this machine; any thread may call it. Advice, and what is taken back, are words only.

    Before the worker has a run, it is the signal that ends it: only the main thread can end the script then.
    """
    global _told
    if notified is None or notified.advice:
        _log.warning(
            "%s; this worker stays", notified.reason if notified else "what was said of this machine was withdrawn"
        )
        return
    _log.warning("%s: this worker leaves", notified.reason)
    _told = (notified.reason, notified.at)
    run = joining.current()
    if run is None:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        run.notice(notified.reason, max(notified.at - time.time(), 0.0))
