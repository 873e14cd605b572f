"""Show finished runs side by side (`python -m eval.report`)."""
