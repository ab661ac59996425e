"""Hosts elsewhere: an agent on each starts its workers, and tells its pool, wherever the two are. See `far_hosts`.

agent      the process on the host
post       whose agent it is, and its folder there
duty       what it has to do: pure
far_hosts  what the pool knows of its hosts: pure, with the argument
link       the pool's connection to its agents, through the coordinator
marked     what agents have left running
"""
