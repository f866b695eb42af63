"""Cross-entropy over given logits."""
