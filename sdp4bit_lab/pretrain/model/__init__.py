"""GPT model, its presets, and its tensor-parallel parts."""
