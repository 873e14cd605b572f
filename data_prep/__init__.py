"""From raw text to token shards: `python -m data_prep.prepare` and `python -m data_prep.inspect`.

Runs from the checkout; only `cat_lm` is an installed package.
"""
