"""The front of a sparse attention layer in two launches, in place of SGLang 0.5.23's own sequence."""
