"""Many data-parallel ranks in one process, with what their communication does to weights and gradients."""
