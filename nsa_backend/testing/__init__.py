"""The harness that demo, benchmarks and tests share: SGLang's calls, KV pools, a process that stands for a server's."""
