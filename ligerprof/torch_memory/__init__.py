"""What torch does with memory, without importing torch: each fact once, with its source."""
