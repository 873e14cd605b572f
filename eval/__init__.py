"""Evaluation commands; they run from the checkout and are not installed."""

import cat_lm  # noqa: F401 -- before all others: it drops the working directory from the path
