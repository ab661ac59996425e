"""What lies where in a run's folder. Files have mode 0600, folders 0700 (see `platform/private.py`)."""

SETTINGS = "settings.json"  # RunSettings, written by `farandole run`
TICKET = "ticket"  # written by the coordinator when it listens
TICKETS = "tickets"  # those issued for others, written by `farandole ticket`
CERTIFICATE = "tls.pem"  # the run's key and certificate, where it serves others than loopback
RECORD = "coordinator.json"  # its pid and address, written last
METRICS = "metrics.jsonl"
JOURNAL = "journal.sqlite"
CHECKPOINTS = "checkpoints"  # unless they are elsewhere
CODE = "code"  # the script, and what the workers have imported from its folder, as they were (see `code/snapshot.py`)
PACK = "code.tar.gz"  # the working folder as other hosts get it (see `code/pack.py`)
LEDGER = "ledger"  # ID.jsonl for each worker, with --ledger
BENCH = "bench"  # ID.jsonl for each worker of `farandole bench`
LOGS = "logs"  # ID.log for each worker of the local pool
ASIDE = "farandole, aside: "  # begins lines of these that nobody is shown
COORDINATOR_LOG = "coordinator.log"
EXPORTS_LOG = "exports.log"  # of the process that writes for TensorBoard and Weights & Biases
TENSORBOARD = "tensorboard"  # unless it is elsewhere
WANDB = "wandb"
LOCK = "lock"  # held by `farandole run` for as long as it lives
FILES = (
    *(SETTINGS, TICKET, CERTIFICATE, RECORD, METRICS, COORDINATOR_LOG, EXPORTS_LOG, LOCK, PACK),
    *(JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", f"{JOURNAL}-journal"),
)
FOLDERS = (CHECKPOINTS, CODE, LEDGER, LOGS, TENSORBOARD, WANDB)
