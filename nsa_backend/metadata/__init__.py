"""Metadata of a forward: planned, written by one launch, and read as views, eager and captured alike."""
