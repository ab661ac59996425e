"""Where workers come from. `base` is the seam and the loop around it; the other files are sources of processes."""
