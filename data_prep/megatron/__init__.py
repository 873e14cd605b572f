"""Token shards that GPT-NeoX's or Megatron-LM's preprocessing wrote."""
