"""NVIDIA's `nixl` for a machine without a GPU: its real transfers, between host memory and host memory."""
