"""Put kernels into a transformers model, and take them out again."""
