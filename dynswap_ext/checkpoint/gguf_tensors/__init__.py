"""GGUF's quantised weights as tensors: their encodings, and how they are decoded on the device."""
