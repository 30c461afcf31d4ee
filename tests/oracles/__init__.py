"""Second accounts of the library's results, which share as little code with it as possible."""
