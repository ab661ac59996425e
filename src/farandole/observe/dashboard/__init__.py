"""The dashboard: a process of its own beside a run, which a browser on this machine may look at. It reads the run's
folder, and asks the coordinator, as any other command does; nothing of a run waits for it.
"""
