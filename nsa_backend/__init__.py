"""DeepSeek sparse attention for SGLang with multi-token prediction whose drafts attend to what they should."""

__version__ = "0.1.0"
