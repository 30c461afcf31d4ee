"""Pretrain a GPT with 4-bit communication."""
