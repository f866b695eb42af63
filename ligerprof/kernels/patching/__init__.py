"""Put kernels into transformers models."""
