"""Run studies: cached cells, tuned learning rates, contrasts, figures and reports."""
