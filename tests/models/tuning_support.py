"""A device that passes for a GPU, for what is kept of a tuning."""

from typing import Any

from tilert.cpu_device import CpuDevice

__all__ = ["FakeGpu"]


class FakeGpu(CpuDevice):
    """Runs kernels on the cpu, and says of itself what a GPU would."""

    kind = "cuda"
    arch = "sm_90a"

    def __init__(self, name: str = "NVIDIA Fake", driver: str = "580.1") -> None:
        super().__init__(check=False)
        self.facts = {"kind": "cuda", "name": name, "arch": "sm_90a", "driver": driver,
                      "multiprocessors": 132}  # fmt: skip

    def info(self) -> dict[str, Any]:
        """See `Device`."""
        return self.facts
