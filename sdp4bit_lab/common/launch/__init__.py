"""Start, join and stop the processes of a run."""
