"""Tensors between the workers of a view: connections, gradient buckets, the reproducible exchange, state transfer."""
