"""The metrics of a run for Prometheus: `/metrics`, by `prometheus_client`, in a registry of the run's own.

Gauges are read from `Status` at each request. Counters count lines as they come, since this process began: a restarted
coordinator counts from 0, as Prometheus expects. Names end in their units, those of counters in `_total`. An unknown
value is absent, and never 0; a loss that is not finite is NaN. The number of series is bounded: by the number of
workers, the kinds of events, and `MOST_LOGGED`.

The account's figures are those of the whole run, including the time before this process began, and some seconds old.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, get_args

from farandole import __version__
from farandole.control import ticket
from farandole.control.run_folder import Observer
from farandole.control.status import AccountStatus, Status
from farandole.coordinator.listener import UnauthenticatedPeers, no_page
from farandole.coordinator.observers import Observers
from farandole.errors import UsageError
from farandole.platform.extras import how_to_install
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.metrics import Line, LogLine, StepLine

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily, Metric


# --- exposition -------------------------------------------------------------------------------------------------------

STATES = ("starting", "training", "stalled", "recovering", "ending", "over")
MOST_LOGGED = 100  # names passed to run.log
STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CACHED_S = 1.0  # more frequent requests get the previous answer, so that reading costs the coordinator little


def require_prometheus() -> None:
    """Raises `UsageError` if prometheus_client is not installed."""
    if find_spec("prometheus_client") is None:
        raise UsageError(
            f"--metrics-token: /metrics needs the package prometheus_client, which is not installed: "
            f"{how_to_install('prometheus')}"
        )


class Exposition(Observer):
    """The metrics of one coordinator. `status` returns the values of the gauges.

    Raises:
        UsageError: prometheus_client is not installed.
    """

    name = "/metrics"

    def __init__(self, status: Callable[[], Status], clock: Callable[[], float] = time.monotonic) -> None:
        require_prometheus()
        from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

        disable_created_metrics()  # one more series for each, which Prometheus does not use
        self._status, self._clock = status, clock
        self._registry = own = CollectorRegistry(auto_describe=False)
        self._steps = Counter("farandole_steps", "Steps taken.", registry=own)
        self._samples = Counter("farandole_samples", "Samples computed in steps, without skipped ones.", registry=own)
        self._skipped = Counter("farandole_samples_skipped", "Bad samples that were skipped.", registry=own)
        self._events = Counter("farandole_events", "Events of the run, by kind.", ["event"], registry=own)
        for kind in get_args(events.Event):  # so that the first event of a kind is an increase
            self._events.labels(events.name_of(kind))
        self._seconds = Histogram(
            "farandole_step_duration_seconds",
            "Wall time of a step, evaluations and pauses included.",
            buckets=STEP_S,
            registry=own,
        )
        self._parts = Counter("farandole_step_seconds", "Wall time of steps, by part.", ["part"], registry=own)
        self._step: StepLine | None = None
        self._logged: dict[str, float] = {}
        self._saved: events.CheckpointEvent | None = None
        self._read: tuple[float, bytes] | None = None
        own.register(_GaugeCollector(self._collect))

    def take(self, line: Line, at: int = 0) -> None:
        del at
        match line:
            case StepLine():
                self._step = line
                self._steps.inc()
                self._samples.inc(max(0, line.samples - line.skipped))
                self._skipped.inc(line.skipped)
                self._seconds.observe(line.seconds)
                parts = {"evaluation": line.evaluation_s, "once": line.once_s, "pause": line.pause_s}
                for part, seconds in {"training": line.training_s, **parts}.items():
                    self._parts.labels(part).inc(seconds)
            case LogLine():
                for name, value in line.fields.items():
                    if not isinstance(value, str) and (name in self._logged or len(self._logged) < MOST_LOGGED):
                        self._logged[name] = math.nan if value is None else float(value)
            case _:
                self._events.labels(events.name_of(line)).inc()
                if isinstance(line, events.CheckpointEvent):
                    self._saved = line

    def text(self) -> bytes:
        """The answer to a request, in the text format 0.0.4."""
        from prometheus_client.exposition import generate_latest

        now = self._clock()
        if self._read is None or now - self._read[0] >= CACHED_S:
            self._read = now, generate_latest(self._registry)
        return self._read[1]

    def _collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        status = self._status()
        yield InfoMetricFamily(
            "farandole_run", "The run.", {"run": status.run, "version": __version__, "bits": status.bits}
        )
        state = GaugeMetricFamily("farandole_run_state", "1 for the current state of the run.", labels=["state"])
        for each in STATES:
            state.add_metric([each], float(each == status.state))
        yield state
        yield from (gauge for gauge in self._gauges(status) if gauge.samples)
        logged = GaugeMetricFamily("farandole_logged", "The newest values that the script logs.", labels=["name"])
        for name, value in self._logged.items():
            logged.add_metric([name], value)
        yield logged
        yield from _workers(status)
        yield from _account(status.account)

    def _gauges(self, status: Status) -> Iterator[GaugeMetricFamily]:
        """The gauges with one value each."""
        step, saved = self._step, self._saved
        yield _gauge("farandole_step", "The current step, from 0.", status.step)
        yield _gauge("farandole_steps_planned", "Steps that the script asks for.", status.total)
        yield _gauge("farandole_epoch", "The current epoch, from 0.", status.epoch)
        yield _gauge("farandole_samples_per_second", "Samples per second over the newest steps.", status.samples_per_s)
        yield _gauge("farandole_stalled_seconds", "Time without progress of any step; 0 if there is progress.",
                     status.stalled.seconds if status.stalled else 0.0)  # fmt: skip
        yield _gauge("farandole_view", "The number of the current view.", status.view.number)
        yield _gauge("farandole_view_workers", "Workers in the current view.", status.view.size)
        yield _gauge("farandole_workers_wanted", "The target number of workers.", status.wanted)
        yield _gauge("farandole_workers_minimum", "The run waits if it has fewer workers.", status.minimum)
        if step is not None:
            loss = math.nan if step.loss is None else step.loss
            rate = step.learning_rate
            yield _gauge("farandole_loss", "Loss of the newest step; NaN if it is not finite.", loss)
            yield _gauge("farandole_learning_rate", "Learning rate set by the script and its schedule.", rate)
            yield _gauge("farandole_learning_rate_factor", "Learning-rate factor of the batch rule.", step.factor)
            yield _gauge("farandole_batch_samples", "Samples of the newest step.", step.samples)
            yield _gauge("farandole_last_step_timestamp_seconds", "Unix time of the newest step.", step.time)
        if saved is not None:
            yield _gauge("farandole_checkpoint_step", "Step of the newest checkpoint.", saved.step)
            yield _gauge("farandole_checkpoint_timestamp_seconds", "Unix time of the newest checkpoint.", saved.time)
            yield _gauge("farandole_checkpoint_size_bytes", "Size of the newest checkpoint.", saved.bytes)
            yield _gauge("farandole_checkpoint_write_seconds", "Write time, in the background.", saved.seconds)
            yield _gauge("farandole_checkpoint_copy_seconds", "Pause of the training for it.", saved.copy_ms / 1000.0)


class _GaugeCollector:
    """A collector, with the method that prometheus_client calls."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """A gauge; without a sample if there is no value."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, text, value=None if value is None else float(value))


def _account(account: AccountStatus | None) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    if account is None:
        return
    spent = CounterMetricFamily("farandole_worker_seconds", "Time of all workers, by class.", labels=["class"])
    for name, seconds in account.seconds.items():
        spent.add_metric([name], seconds)
    yield spent
    for gauge in (
        _gauge("farandole_goodput_ratio", "The part of that time spent on work that counts.", account.goodput),
        _gauge("farandole_cost_dollars", "Cost so far; only if all prices are known.", account.dollars),
    ):
        if gauge.samples:
            yield gauge


def _workers(status: Status) -> Iterator[GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    counted = GaugeMetricFamily("farandole_workers", "Workers, by state.", labels=["state"])
    for state in ("starting", "ready", "member", "leaving", "finished"):
        counted.add_metric([state], sum(worker.state == state for worker in status.workers))
    speed = GaugeMetricFamily(
        "farandole_worker_speed_ratio", "Speed relative to the fastest worker.", labels=["worker", "host"]
    )
    shards = GaugeMetricFamily(
        "farandole_worker_shards", "Micro-batches of the worker in its newest step.", labels=["worker", "host"]
    )
    for worker in status.workers:
        if worker.speed is not None:
            speed.add_metric([worker.id, worker.host], worker.speed)
        if worker.of:
            shards.add_metric([worker.id, worker.host], worker.shards)
    yield from (counted, speed, shards)


# --- scraping ---------------------------------------------------------------------------------------------------------
#
# `/metrics` at the coordinator's port, for a client that shows the scrape token: one request, one answer, and the
# connection ends.
#
# The client is still unauthenticated: it has shown no ticket, and gets no further. Only the head of its request is
# read, by the same few lines that read every unauthenticated peer's (`listener.py`); the HTTP library never sees it.
# The token opens only this page: another path is answered 404. It is compared by a digest, in a time that reveals
# nothing of it, and a wrong one is dismissed like any unauthenticated peer. If no token is configured, or its file
# can't be read, there is no page, and a bearer token is dismissed too.

_log = logging.getLogger(__name__)
PATH = "/metrics"
_BEARER = "Bearer "
_HEAD = "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
_TEXT, _METRICS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(
    settings: RunSettings, status: Callable[[], Status], observers: Observers, record: UnauthenticatedPeers
) -> Callable[[str, str], bytes]:
    """The function that answers an Authorization and a request "METHOD PATH"; b"" unless it shows the run's token."""
    token = settings.exports.metrics_token
    if not token:
        return no_page
    try:
        page = Page(ticket.load_scrape_token(token), Exposition(status), record)
    except UsageError as error:  # the file was readable when the run began; the training goes on without it
        _log.warning("there is no %s: %s", PATH, error)
        record.report_error(f"there is no {PATH}: {error}")
        return no_page
    observers.local.append(page.exposition)
    return page.answer


class Page:
    """The page of `exposition`, for clients that show `token`. `record` gets errors."""

    def __init__(self, token: bytes, exposition: Exposition, record: UnauthenticatedPeers) -> None:
        self.exposition = exposition
        self._digest, self._record = _digest(token), record

    def answer(self, authorization: str, target: str) -> bytes:
        """The whole answer to a request for `target`; b"" if the token is not shown."""
        if not authorization.startswith(_BEARER):
            return b""
        token = authorization.removeprefix(_BEARER).strip(" ").encode("latin-1", "replace")
        if not hmac.compare_digest(_digest(token), self._digest):
            return b""
        if target.partition("?")[0] != f"GET {PATH}":
            return _answer("404 Not Found", f"this token opens only GET {PATH}\n".encode(), _TEXT)
        try:
            return _answer("200 OK", self.exposition.text(), _METRICS)
        except Exception as error:  # noqa: BLE001  it only reports: one answer is missing, and nothing else
            sentence = f"{PATH} can't be answered: an internal error of farandole ({type(error).__name__})"
            if self._record.report_error(sentence):
                _log.error("%s", sentence, exc_info=error)
            return _answer("500 Internal Server Error", f"{sentence}\n".encode(), _TEXT)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _answer(status: str, content: bytes, kind: str) -> bytes:
    return _HEAD.format(status, kind, len(content)).encode() + content
