"""The parts of `load`: skeletons, comparing keys, reading and casting entries, and undoing a failed load."""
