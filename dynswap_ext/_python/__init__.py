"""The pure-Python provider: the semantics of the native engine without prefetch, wherever torch runs."""
