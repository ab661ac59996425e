"""The script and the modules in its folder at the run's beginning: copied once, executed by every worker.

This package runs before the script's own imports, so it must import nothing heavy.
"""
