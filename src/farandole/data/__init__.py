"""Samples: their order, their random state, prefetching, and the check that each was used once. `order` gives the
samples of a step and the random state of each sample, `workers` makes a micro-batch of them, `loader` prefetches
micro-batches, `ledger` checks afterwards that every sample was used exactly once. Which worker computes which shard is
not decided here.
"""
