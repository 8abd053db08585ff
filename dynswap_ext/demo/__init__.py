"""The code of ``dynswap demo``: a model runs under a budget that does not hold it, and is measured."""
