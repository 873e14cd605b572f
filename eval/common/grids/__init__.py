"""Grids of small models: cells on disk, an estimate, rates that are chosen, parallel processes."""
