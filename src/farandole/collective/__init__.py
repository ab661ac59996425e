"""Tensor traffic between the workers of a view: connections, gradient buckets, the reproducible exchange of gradients,
and the transfer of the state to a joiner. This package does not decide who takes part: the caller passes a view, and
gets a report of what broke.
"""
