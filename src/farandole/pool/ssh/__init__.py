"""Hosts of a hosts file, reached by the system's `ssh`.

pool        the seam: who of the file is there, and what has become of the workers
hosts_file  the file, and that it is watched
reach       when a host is tried: pure
there       a command on a host, and what its failure means
survey      `farandole hosts check`, with `examined` at its far end; `everywhere` runs a command, `sending` copies
"""
