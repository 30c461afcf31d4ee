"""GPT pretraining with 4-bit communication: imported by the command line only."""
