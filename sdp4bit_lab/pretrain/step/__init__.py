"""One optimizer step: the model laid out over ranks, its gradients, its update."""
