"""Evaluations: rounds without an update, whose metrics are summed as lanes in the order of the tree."""
