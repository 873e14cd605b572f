"""The transforms of values: one file each, with an ENTRY."""
