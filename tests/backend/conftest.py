"""The real SGLang package in this process, with the plugin loaded, on a machine without a GPU."""

from nsa_backend.testing.process import start_process

start_process()
