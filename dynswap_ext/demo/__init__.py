"""``python -m dynswap_ext demo``: a model that does not fit its budget runs, measured against the limit."""
