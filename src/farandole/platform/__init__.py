"""Services of the operating system: private files, output that never fails, parent processes, descriptors, forks.
It knows nothing of runs, workers or training, and imports no other package of farandole.
"""
