"""Who takes part in a run, as agreed by everyone: views, messages, and the state machines of coordinator and worker.

Pure: no I/O, clock, thread or torch. Time comes in as a number, and what is to be done goes out as a value.
"""
