"""CUDA C++ from the tile IR. No GPU is needed to generate or to compile it."""

from tilert.codegen.generate import CudaSource, generate

__all__ = ["CudaSource", "generate"]
