"""Output for people: sentences of events, live display, tables, dashboard, report, exports and the final summary.

This package reads the lines of metrics.jsonl, or the same lines from the coordinator. It changes nothing. No torch.
"""
