"""A worker's part in a run: its rounds, its groups of connections, its connection to the coordinator, and its exit.

This package handles tensors and callbacks; steps, optimizers and metrics belong to the packages above it.
"""
