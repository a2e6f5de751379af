"""Single calls on the GPU: attention and the chain around it, and how a call is timed."""
