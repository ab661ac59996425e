"""Attacks on a live run: each must end with the run as it was, the bits of a world of one, and no secret out.

python -m attack                # all of them, in under five minutes on two cores
python -m attack --list         # who does what
python -m attack --only NAME    # one, or those whose names begin so
python -m attack --short        # what `make test` shows of it

The run is a real one, `farandole run` with three workers on the digits (chaos/job.py). Who has nothing of the run's, a
stranger, is a process of another user where root is to be had, and else one of our own user; then a file's mode holds
nobody off, and attacks that come through files are left out, by name.

base.py       what an attack is, and who makes it
live.py       the run under attack, and what must hold after each attack and in the end
stranger.py   a process of another user, and what it got hold of
network.py    a network in which nobody else listens
table.py      the attacks, in order:
port.py       a stranger at the coordinator's port
thief.py      ... who is after that port itself, or sits at another address
listeners.py  ... at the workers' ports, by gloo.py
folders.py    another user at the run's folder
authors.py    who made a run's folder that is replayed
handed.py     who made shards and checkpoints: files.py, which reader.py reads
telling.py    who holds a ticket and tells what is not so: lines.py
inside.py     a member that does: insider.py
"""
