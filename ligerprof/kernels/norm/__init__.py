"""RMSNorm, with or without the residual addition before it, and LayerNorm."""
