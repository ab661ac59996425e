"""Attacks on a live run."""
