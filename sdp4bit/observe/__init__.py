"""Reports about quantized communication, from names, numbers and thresholds; they know no engine."""
