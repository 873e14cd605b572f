"""Draw and tell what grids found."""
