"""What quantized communication would gain on a cluster, before anything runs; integers and a cost model."""
