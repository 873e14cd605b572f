"""This project's callbacks, one per file as `ENTRY`; `cat_lm.callbacks` finds them by name."""
