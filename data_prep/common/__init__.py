"""What all steps of a preparation share: amounts, locks, progress, workers, unfinished work."""
