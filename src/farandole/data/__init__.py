"""Samples: in which order, in which random state, fetched ahead of the plan, and counted. `order` names the samples
of a step, `seeding` the random state of each, `source` makes a micro-batch of them, `loader` fetches micro-batches
ahead, `ledger` proves afterwards that every sample was used exactly once. Which shards are whose is not decided here.
"""
