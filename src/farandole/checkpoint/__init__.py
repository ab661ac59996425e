"""Checkpoints: the last resort, when every worker is gone or the run was stopped."""
