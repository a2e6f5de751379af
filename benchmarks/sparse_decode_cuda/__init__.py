"""Sparse MLA decode in CUDA C++, measured and not served (docs/numbers/attention.md says why); it runs from a checkout."""
