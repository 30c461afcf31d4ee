"""Compare strategies and seeds under identical conditions."""
