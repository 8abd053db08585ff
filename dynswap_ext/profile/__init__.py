"""Figures of an install: counters, the report, recordings, traces and timelines."""
