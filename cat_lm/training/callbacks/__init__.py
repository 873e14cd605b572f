"""This project's callbacks, a file each with its ENTRY; `cat_lm.callbacks` finds them by name."""
