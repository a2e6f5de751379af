"""One CUDA graph for a whole speculative round; knows nothing of SGLang."""
