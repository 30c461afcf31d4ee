"""Integrations with trainers, one module each; only the module imports the trainer's package."""
