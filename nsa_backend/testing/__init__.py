"""What demo, benchmarks and tests share: SGLang's calls, KV pools, and a process without a GPU that stands for a server's."""
