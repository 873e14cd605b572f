"""The kinds of mixers: one file each, with an ENTRY."""
