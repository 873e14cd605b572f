"""Load, check and describe folders of trained models."""
