"""The script and the modules beside it as the run began with them: copied once, executed by every worker. It runs
before any of the script's own imports, so nothing heavy may be imported here.
"""
