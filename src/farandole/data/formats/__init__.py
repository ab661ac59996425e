"""Datasets in formats of other tools: WebDataset, tables, MosaicML streaming."""
