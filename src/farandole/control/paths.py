"""What lies where in a run's folder."""

SETTINGS = "settings.json"  # mode 0600: RunSettings, written by `farandole run`
TICKET = "ticket"  # mode 0600, written by the coordinator when it listens
TICKETS = "tickets"  # mode 0600: those issued for others, written by `farandole ticket`
CERTIFICATE = "tls.pem"  # mode 0600: the run's key and certificate, where it serves others than loopback
RECORD = "coordinator.json"  # its pid and address, written last
METRICS = "metrics.jsonl"
JOURNAL = "journal.sqlite"
CHECKPOINTS = "checkpoints"  # unless they are elsewhere
CODE = "code"  # the script, and what the workers have imported from its folder, as they were (see `sources.py`)
LOGS = "logs"  # ID.log for each worker of the local pool
ASIDE = "farandole, aside: "  # begins lines of these that nobody is shown
COORDINATOR_LOG = "coordinator.log"
LOCK = "lock"  # held by `farandole run` for as long as it lives
