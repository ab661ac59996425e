"""A simulated run: the shipped state machines on a fake clock and network, under faults. No torch, threads or sleep."""
