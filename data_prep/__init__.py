"""From raw text to token shards: `python -m data_prep.prepare`, `inspect` and `adopt`.

Runs from the checkout; only `cat_lm` is an installed package. Stages import one way: `assemble`,
`encode`, `sources`.
"""

import cat_lm  # noqa: F401 -- before all others: it drops the working directory from the path
