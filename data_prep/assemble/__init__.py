"""Parts to the finished folder: selection, shards, manifest."""
