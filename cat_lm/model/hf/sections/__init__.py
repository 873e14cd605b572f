"""The keys of a model, by family: what a run's YAML says and what a configuration's fields are."""
