"""One HTML page about training runs."""
