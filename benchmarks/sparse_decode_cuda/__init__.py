"""Sparse MLA decode in CUDA C++: a measured variant, not served (docs/numbers.md says why), that runs from a checkout."""
