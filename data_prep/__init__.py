"""From raw text to token shards: `python -m data_prep.prepare`, `inspect` and `adopt`.

Runs from the checkout; only `cat_lm` is an installed package. Stages import one way: `assemble`,
`encode`, `sources`.
"""
