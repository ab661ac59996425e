"""A worker among others: its rounds, its groups of connections, its word with the coordinator, and its end."""
