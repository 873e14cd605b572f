"""The default text of studies: the standard library's source, without codec tables."""

# Codec tables, a fifth of the library's source: near-copies of each other, which are in both
# splits, so that they inflate copying and make errors over documents too small.
EXCLUDED = "encodings/*"
LIBRARY = ("--source", "python-stdlib", "--exclude", EXCLUDED)  # arguments of data_prep.prepare
