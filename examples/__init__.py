"""Programs to run and to read; see README.md here."""
