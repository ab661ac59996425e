"""Studies that take longer than a test: each a folder with its commands, its results and a page."""
