"""Formats of data sets that others have made: WebDataset, tables, MosaicML streaming."""
