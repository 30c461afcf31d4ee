"""The processes of a run: started, joined, ended together."""
