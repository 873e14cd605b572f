"""Share what several evaluation commands read, write and draw."""
