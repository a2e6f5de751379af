"""A small model of DeepSeek-V3.2's architecture trained on real text, and what its drafts are worth when it is served."""
