"""Sparse and dense attention: a table of implementations, what each is given, and what prefill needs beside them."""
