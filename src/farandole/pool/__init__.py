"""Sources of workers. `base` is the interface, `reconciler` decides which actions are due and runs a pool; the other
files are pools. A pool starts, stops and counts workers. The number of workers that a run wants, and which may enter,
are decided elsewhere. No torch in its process.
"""
