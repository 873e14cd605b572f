"""What the mixers share: their description, options, filtered streams, attention, recurrences."""
