"""Backends that compile the tile IR: NumPy for every machine, CUDA C++ for NVIDIA GPUs."""

__all__: list[str] = []
