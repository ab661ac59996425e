"""The page of the dashboard and of the report. It computes no figures: `observe/story.py` provides all of them."""
