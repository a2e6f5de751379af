"""The boundary to SGLang: one folder a generation of its releases. Nothing is loaded until `installed` is imported."""
