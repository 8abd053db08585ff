"""The head-to-head of `peers.py`: workloads, contenders, how one is measured, and how the rows are shown."""
