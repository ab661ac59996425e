"""What farandole asks of the operating system: private files, output that never fails, parents, descriptors, forks.
It knows nothing of runs, workers or training, and imports no other room.
"""
