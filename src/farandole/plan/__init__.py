"""Shards, batch policies, learning-rate rules and the summation tree: pure arithmetic that gives the same result on
every worker, so that no part of a plan has to be sent. No I/O, clock, thread or torch.
"""
