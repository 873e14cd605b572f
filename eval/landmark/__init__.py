"""What trained models lose where their attention reads chosen blocks of keys alone."""
