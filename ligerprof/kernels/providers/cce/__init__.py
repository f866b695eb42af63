"""The fused loss of cut-cross-entropy, an optional package."""
