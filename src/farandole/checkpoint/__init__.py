"""Checkpoints, for the case that every worker is lost or the run was stopped: stores, content, ownership, schedule.

The package receives and returns a state, and does not depend on the workers.
"""
