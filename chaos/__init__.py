"""Chaos on real processes: runs of the digits job under random faults, each checked bit for bit and sample for sample.

python -m chaos --minutes 10 --seed 1      # run after run; every one has its own seed, told in its line
python -m chaos --seed 42 --runs 1         # the one of seed 42 again
python -m chaos --network --runs 5         # hosts in network namespaces, their links broken; needs root
python -m chaos.script SCRIPT [ARGUMENTS]  # any other training script, through joins, leaves and kills

schedule.py   seed in, faults out: what is struck when (pure)
watch.py      a run as seen from outside: its metrics.jsonl, its processes, who certainly holds the state
attack.py     one run, struck by its schedule
verdict.py    what a run has left, compared with the undisturbed job: complaints, or none
network.py    hosts as network namespaces, and what is done to their links
job.py        the training script
script.py     any other one in its place, which paced.py slows down
"""
