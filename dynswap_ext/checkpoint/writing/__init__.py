"""The parts of `save` and `convert`, which write a checkpoint whole or not at all, and in little memory."""
