"""The rows of the architectures, by what they resemble."""
