"""Checkpoints that are made on the spot."""
