"""The backend at work on a machine without a GPU: SGLang's own batch, pool and draft loop around a tiny model."""
