"""The script and the modules beside it as the run began with them: copied once, executed by every worker."""
