"""The lossless code of weights: fewer bytes for the same values, to the bit."""
