"""Side-by-side measurements against torch DDP, FSDP2 and DeepSpeed. Run as `python -m benchmarks.<file>`."""
