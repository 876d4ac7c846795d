"""Command-line tools: ``python -m pk``."""
