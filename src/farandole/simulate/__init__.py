"""A simulated run: the shipped state machines on a fake clock and network, with fault injection. It uses no torch,
threads or sleep.
"""
