"""Prefill context parallel on the releases of this generation whose rules for it are served."""
