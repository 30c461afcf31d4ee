"""Tokens: from text or Megatron's files to the micro batches of a rank."""
