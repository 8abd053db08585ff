"""The swap layer: the classes that installed modules get, and how they keep behaving as torch expects."""
