"""The room `trainers`, without the trainers; with them: tests/ecosystem."""
