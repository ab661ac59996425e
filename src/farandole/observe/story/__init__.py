"""What a run's lines tell, ready to be drawn: pure, lines in, values out. No page, no server, no file."""
