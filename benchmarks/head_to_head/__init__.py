"""The comparison of `peers.py`: workloads, baselines, how one is measured, and how the rows are shown."""
