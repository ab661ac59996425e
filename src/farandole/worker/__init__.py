"""A worker among others: its rounds, its groups of connections, its word with the coordinator, and its end. Of the
model it knows tensors and callbacks: what a step, an optimizer or a metric is, only the rooms above know.
"""
