"""SGLang 0.5.12 and 0.5.12.post1."""
