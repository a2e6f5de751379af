"""What was measured: cells, traces of a profiler, result files, tables and figures."""
