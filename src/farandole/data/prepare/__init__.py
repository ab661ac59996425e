"""`farandole data`: data sets cut into shards, or indexed as they are."""
