"""Who takes part, agreed by everyone: pure state machines, no I/O, no clock, no threads, no torch."""
