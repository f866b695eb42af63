"""Linear layer and cross-entropy fused: the logits never whole."""
