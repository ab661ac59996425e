"""What a cloud says to a machine of its own end: a reader for each of three clouds, and who asks them.

Here is what is asked of the metadata services, and how often; nothing here decides what follows from a notice. That is
for the pool whose host this is (`pool/agent.py` tells it), or for the worker that has joined by itself
(`script.py`).
"""
