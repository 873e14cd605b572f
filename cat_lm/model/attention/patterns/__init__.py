"""The patterns of attention: one file each, with an ENTRY."""
