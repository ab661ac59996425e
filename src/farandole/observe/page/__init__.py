"""The page that the dashboard serves and the report is. No figure is made here: all of them come from `story/`."""
