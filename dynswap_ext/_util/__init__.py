"""Helpers that know nothing of installs: amounts of memory, progress, warnings, the log."""
