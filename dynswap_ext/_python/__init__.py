"""The pure-Python provider: does what the native engine does, but without prefetch, wherever torch runs."""
