"""The process that decides views and serves the control port: what strangers, workers and people reach there."""
