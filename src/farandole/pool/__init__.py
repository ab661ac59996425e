"""Where workers come from. `base` is the seam, `keeper` decides what is due, `service` does it; the others are pools. A
pool starts, ends and counts; how many are wanted, and who may enter, is decided elsewhere. No torch in its process.
"""
