"""Tensors between the workers of a view: connections, gradient buckets, the reproducible exchange, the state on its
way to a joiner. Who takes part is not decided here: a view comes from outside, and whoever asked is told what broke.
"""
