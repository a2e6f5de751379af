"""What `python -m nsa_backend` runs, one module a subcommand."""
