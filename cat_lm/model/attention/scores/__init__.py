"""The transforms of scores: one file each, with an ENTRY."""
