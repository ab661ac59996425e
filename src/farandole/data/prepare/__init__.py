"""`farandole data`: cuts datasets into shards, or writes an index for existing ones."""
