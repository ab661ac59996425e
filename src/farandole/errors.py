"""The whole error tree.

    FarandoleError
    ├── UsageError             the script, the command line or a setting asks for what can't be done
    │   ├── NotReplicated      steps() before replicate()
    │   ├── LossNotScalar      step.backward(loss) with a loss that is not one number
    │   ├── NotDeterministic       an operator without a deterministic form on CUDA, under --bits same
    │   ├── StepAbandoned      an iteration left halfway: its gradients would be lost
    │   ├── UnknownState       a state_dict holds what can't be sent without pickling
    │   ├── RunFolderInUse     a second `farandole run`, or script that trains by itself, in a live run's folder
    │   ├── NoFileLocks        a file system that keeps no locks (`platform/files.py`)
    │   └── NotPrivate         a file or folder of the run's that is another's; an OSError, too
    ├── Refused                the coordinator does not let this worker in, and says why
    ├── RunEnded               this process is no use to the run any more: another one is
    ├── CheckpointsGone        checkpoints that the run has written are not where they were
    ├── CoordinatorUnreachable no answer at the ticket's address
    │   ├── CoordinatorAway    the run trains on meanwhile: ask again
    │   └── NotTheCoordinator  an answer, and not the run's coordinator's
    ├── HostNotPrepared        `--prepare` failed here
    ├── AwsError               AWS has said no, or nothing (`pool/ec2.py`)
    ├── ShardError             a shard of the data is missing, damaged, or can't be reached
    │   └── Torn               what came of it is not the file (`data/object_store.py`)
    ├── StateDisputed          two workers that should hold the same state have sent different ones
    ├── BadSample              a sample that can't be decoded, or the files that can't
    ├── LoaderDied             DataLoader processes die as often as they are started
    ├── DamagedError           a checkpoint that does not count, and why (`checkpoint/store.py`)
    ├── PeerLost               the connection to a peer is broken (`collective/transport.py`)
    ├── Unproved               who is connected as a peer is not that one (`collective/transport.py`)
    ├── Unusable               memory that another process has handed over can't be shared (`collective/arena.py`)
    ├── LedgerError            the ledger's records contradict each other
    │   └── LedgerIncomplete   some of them could not be written
    └── ProtocolError          a peer or the coordinator broke the protocol: a bug, never the user's fault

Each message names the value, the limit and the remedy.
"""

from __future__ import annotations

import errno


class FarandoleError(Exception):
    """Everything that this package raises on purpose."""


class UsageError(FarandoleError, ValueError):
    """What was asked for can't be done as asked."""


class NotReplicated(UsageError):
    """Training began before `run.replicate(...)` said what is trained."""


class LossNotScalar(UsageError):
    """The loss handed to `step.backward` is not one number."""


class NotDeterministic(UsageError):
    """An operator that the script uses can't compute the same bits twice on its device."""


class StepAbandoned(UsageError):
    """A step's or an epoch's iteration was left before its end."""


class UnknownState(UsageError):
    """A state_dict holds a value that can't be sent without pickling."""


class RunFolderInUse(UsageError):
    """The folder belongs to a run that is alive."""


class NotPrivate(UsageError, PermissionError):
    """Somebody else has made, or can change, what a run was about to use in its folder (`platform/files.py`)."""

    def __init__(self, text: str) -> None:
        PermissionError.__init__(self, errno.EPERM, text)  # what goes on without a file does so here

    def __str__(self) -> str:
        return self.strerror or ""


class Refused(FarandoleError):
    """The coordinator refused this worker; the first difference is in the message."""


class RunEnded(FarandoleError):
    """This process can't go on; the run goes on without it, and starts another one."""


class CheckpointsGone(FarandoleError):
    """What the run goes on from is not where it was: to begin earlier would be to lose it quietly."""


class CoordinatorUnreachable(FarandoleError):
    """Nobody answers at the ticket's address."""


class CoordinatorAway(CoordinatorUnreachable):
    """Nobody answers just now, and the run trains on: ask again."""


class NotTheCoordinator(CoordinatorUnreachable):
    """Who answers at the ticket's address is not the run's coordinator; the ticket's secret was not sent."""


class HostNotPrepared(FarandoleError):
    """What `--prepare` asked for failed on this host."""


class ShardError(FarandoleError):
    """A shard of the data is missing, damaged, or can't be reached. That is the fault of the worker's host: the run
    goes on without the worker (`protocol/coordinator/failures.py`). A script's own dataset may raise it, too.
    """


class StateDisputed(FarandoleError):
    """What one worker, `sender`, has sent of the run's state is not what another one, `witness`, has there."""

    def __init__(self, text: str, sender: str, witness: str) -> None:
        super().__init__(text)
        self.sender = sender
        self.witness = witness


class BadSample(FarandoleError):
    """A sample that can't be decoded; its index, or its file, is in the message."""


class LoaderDied(FarandoleError):
    """DataLoader processes die as often as they are started; the signal and the likely cause are in the message."""


class LedgerError(FarandoleError):
    """The ledger's records contradict each other, or some could not be written."""


class LedgerIncomplete(LedgerError):
    """Records that could not be written are missing."""


class ProtocolError(FarandoleError):
    """A peer broke the protocol; this is a bug of ours."""
