"""vLLM as an engine: its server, or its engine in this process, with a worker extension of ours."""
