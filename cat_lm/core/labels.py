"""Name the label of positions that are not scored."""

IGNORE_INDEX = -100  # as in torch's cross entropy
