"""Recurrences along time: a state that decays (`decaying_scan`), and the delta rule."""
