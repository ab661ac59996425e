"""What people see of a run: events in plain words, the live display, the status table, the pauses of a finished run.
It reads lines of metrics.jsonl, or the same lines as they come from the coordinator; it changes nothing. No torch.
"""
