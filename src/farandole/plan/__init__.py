"""Shards, batch policies and the summation tree: pure arithmetic that every worker does alike."""
