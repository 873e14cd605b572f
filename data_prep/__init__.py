"""Convert raw text to token shards: `python -m data_prep.prepare`, `inspect` and `adopt`.

The package runs from a checkout; only `cat_lm` is installed. `assemble` imports `encode`, which
imports `sources`.
"""

import cat_lm  # noqa: F401 -- must be first: it removes the working directory from the path
