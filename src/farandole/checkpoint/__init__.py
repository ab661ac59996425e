"""Checkpoints, the last resort, when every worker is gone or the run was stopped: where they are, what is in one, who
can reach it, when one is due. It is handed a state and hands one back, and knows nothing of who trains.
"""
