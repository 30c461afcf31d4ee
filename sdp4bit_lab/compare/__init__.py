"""Several strategies and seeds under the same conditions, and what came out."""
