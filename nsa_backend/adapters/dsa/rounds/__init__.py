"""Speculative rounds in one graph on the releases of this generation that have them."""
