"""Adopt token shards that the preprocessing of GPT-NeoX or Megatron-LM has written."""
