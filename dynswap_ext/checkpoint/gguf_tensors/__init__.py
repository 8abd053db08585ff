"""GGUF's quantised weights as tensors, and the decoding of their blocks on the device."""
