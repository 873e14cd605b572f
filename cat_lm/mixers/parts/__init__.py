"""Parts of the mixers: descriptions, options, filtered streams, attention, recurrences."""
