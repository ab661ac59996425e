"""Where workers come from. `base` is the seam and the loop around it; the other files are sources of processes. A
pool starts, ends and counts; how many are wanted, and who may enter, is decided elsewhere. No torch in its process.
"""
