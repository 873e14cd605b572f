"""The families of models: one file each, with an ENTRY."""
