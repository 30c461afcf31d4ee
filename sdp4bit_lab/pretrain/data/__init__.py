"""Read tokens from text or Megatron's files and form the micro batches of a rank."""
