"""What farandole asks of the operating system: private files, output that never fails, parents, descriptors, forks."""
