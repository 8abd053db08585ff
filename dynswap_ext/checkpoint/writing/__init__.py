"""How a checkpoint is written: whole or not at all, in little memory, each block with a checksum."""
