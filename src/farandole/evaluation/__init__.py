"""Evaluations: rounds without an update, whose metrics are summed as lanes in the order of the tree. Nothing here
changes the replica, and nothing here imports torchmetrics: if a metric is one of its, the script has.
"""
