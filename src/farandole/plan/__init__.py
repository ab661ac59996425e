"""Shards, batch policies, learning-rate rules and the summation tree: pure arithmetic that every worker does alike,
so that nothing of it has to be sent. No I/O, clock, thread or torch.
"""
