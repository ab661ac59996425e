"""Who takes part, agreed by everyone: views, the messages about them, and the state machines on both sides. Pure, no
I/O, clock, thread or torch: time comes in as a number, and what is to be done goes out as a value.
"""
