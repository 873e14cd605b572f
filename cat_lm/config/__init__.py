"""The configuration of a run; imports neither torch nor transformers."""

from cat_lm.config.loading import known_keys, load_config
from cat_lm.config.run import RunConfig, changed_values

__all__ = ["RunConfig", "changed_values", "known_keys", "load_config"]
