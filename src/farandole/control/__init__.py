"""The I/O around `membership`: the coordinator's server and process, its journal, the ticket, and who talks to it."""
