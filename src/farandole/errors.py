"""All exceptions of this package, in one tree.

    FarandoleError
    ├── UsageError             the script, the command line or a setting asks for what can't be done
    │   ├── NotReplicated      steps() before replicate()
    │   ├── LossNotScalar      step.backward(loss) with a loss that is not one number
    │   ├── NotDeterministic       an operator without a deterministic form on CUDA, under --bits same
    │   ├── StepAbandoned      an iteration ended before its last micro-batch: its gradients would be lost
    │   ├── StreamEnded        a stream has fewer samples than its length, or than the run needs (`data/stream.py`)
    │   ├── UnknownState       a state_dict holds a value that can't be sent without pickling
    │   ├── RunFolderInUse     a second `farandole run`, or a script without a coordinator, in a live run's folder
    │   ├── NoFileLocks        the file system does not support locks (`platform/files.py`)
    │   └── NotPrivate         a file or folder of the run belongs to another user; also an OSError
    ├── Refused                the coordinator does not admit this worker, and states the reason
    ├── WorkerSuperseded       the run continues without this process, and another one replaces it
    ├── CheckpointsGone        checkpoints that the run has written are not where they were
    ├── CoordinatorUnreachable no answer at the ticket's address
    │   ├── CoordinatorAway    no answer at the moment; the run trains on: try again
    │   └── NotTheCoordinator  the answer is not from the run's coordinator
    ├── HostNotPrepared        `--prepare` failed on this host
    ├── AwsError               AWS refused a call, or did not answer (`pool/ec2.py`)
    ├── EngineError            a cluster's scheduler refused a request, or did not answer (`pool/cluster.py`)
    ├── ShardError             a data file (a shard of a data set) is missing, damaged, or can't be reached
    │   └── Torn               the bytes that arrived are not the file (`data/object_store.py`)
    ├── TrainingFailed         a run that Python code has started did not finish (`integrations/ray.py`)
    ├── ScriptRaised           the script failed in a process of `farandole check` (`check/legs.py`)
    ├── StateDisputed          two workers that should hold the same state have sent different ones
    ├── BadSample              a sample, or its file, can't be decoded
    ├── LoaderDied             DataLoader worker processes keep dying
    ├── DamagedError           a checkpoint that does not count, with the reason (`checkpoint/store.py`)
    ├── PeerLost               the connection to a peer is broken (`collective/transport.py`)
    ├── Unproved               the process connected as a peer is not that peer (`collective/transport.py`)
    ├── Unusable               memory that another process has passed on can't be shared (`collective/arena.py`)
    ├── LedgerError            the ledger's records contradict each other
    │   └── LedgerIncomplete   some records could not be written
    └── ProtocolError          a peer or the coordinator broke the protocol: a bug, never the user's fault

Each message names the value, the limit and the remedy.
"""

from __future__ import annotations

import errno


class FarandoleError(Exception):
    """Base class of all exceptions that this package raises on purpose."""


class UsageError(FarandoleError, ValueError):
    """An argument, option, path or setting is invalid, or the script uses the API in the wrong way."""


class NotReplicated(UsageError):
    """The script uses an object that `run.replicate(...)` has not received, or was not called at all."""


class LossNotScalar(UsageError):
    """The loss passed to `step.backward` is not one number."""


class NotDeterministic(UsageError):
    """An operator that the script uses does not give the same bits twice on its device."""


class StepAbandoned(UsageError):
    """The iteration over a step or an epoch ended too early."""


class UnknownState(UsageError):
    """A state_dict holds a value that can't be sent without pickling."""


class RunFolderInUse(UsageError):
    """The folder belongs to a run that is still alive."""


class NotPrivate(UsageError, PermissionError):
    """Another user owns, or can change, a file that a run is about to use in its folder (`platform/files.py`)."""

    def __init__(self, text: str) -> None:
        PermissionError.__init__(self, errno.EPERM, text)  # code that continues without a file catches OSError

    def __str__(self) -> str:
        return self.strerror or ""


class Refused(FarandoleError):
    """The coordinator refused this worker. The message names the first difference."""


class WorkerSuperseded(FarandoleError):
    """The run continues without this process, and the pool starts another worker in its place.

    The other workers have finished the round without this one, or this process would have to take over a state twice.
    Its state is of no use any more. The caller must not retry and must not report a failure of the run: end the process
    with the exit code of an evicted worker (`script.py` does). A worker that joins anew receives the current state.
    """


class CheckpointsGone(FarandoleError):
    """Checkpoints that the run needs to resume are missing. To begin earlier would lose steps without a message."""


class CoordinatorUnreachable(FarandoleError):
    """No process answers at the ticket's address."""


class CoordinatorAway(CoordinatorUnreachable):
    """The coordinator does not answer at the moment, and the run trains on. The caller should try again."""


class NotTheCoordinator(CoordinatorUnreachable):
    """The process at the ticket's address is not the run's coordinator. The ticket's secret was not sent."""


class HostNotPrepared(FarandoleError):
    """The preparation that `--prepare` requests failed on this host."""


class ShardError(FarandoleError):
    """A data file (a shard of a data set) is missing, damaged, or can't be reached.

    The cause is the worker's host, so the run continues without the worker (`protocol/coordinator/failures.py`). A
    dataset of the script may raise it too.
    """


class StateDisputed(FarandoleError):
    """The part of the run's state that worker `sender` has sent differs from the one that worker `witness` holds."""

    def __init__(self, text: str, sender: str, witness: str) -> None:
        super().__init__(text)
        self.sender = sender
        self.witness = witness


class BadSample(FarandoleError):
    """A sample can't be decoded. The message names its index or its file."""


class LoaderDied(FarandoleError):
    """DataLoader worker processes keep dying after each restart. The message names the signal and the likely cause."""


class LedgerError(FarandoleError):
    """The ledger's records contradict each other, or some could not be written."""


class LedgerIncomplete(LedgerError):
    """The ledger lacks records that could not be written."""


class ProtocolError(FarandoleError):
    """A peer or the coordinator broke the protocol. This is a bug in farandole."""
