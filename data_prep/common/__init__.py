"""Option values, progress bars and worker processes, for all steps of a preparation."""
