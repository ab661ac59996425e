"""Evaluations: rounds without an update, whose metrics are summed as lanes in the order of the tree.

This package does not change the replica, and does not import torchmetrics: a script that uses its metrics does.
"""
