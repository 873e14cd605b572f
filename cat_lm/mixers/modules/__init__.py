"""The modules of the mixers, and the parts that they share."""
