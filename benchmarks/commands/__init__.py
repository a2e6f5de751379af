"""What `bench` measures: one module a command, and the sections that a command shares with no other."""
