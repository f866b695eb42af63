"""Linear layer and cross-entropy fused, without ever holding all logits."""
