"""The GPT: its sizes by name, and its parts over tensor-parallel ranks."""
