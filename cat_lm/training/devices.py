"""GPUs by their makers' data sheets, and what is assumed of networks. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from cat_lm.core.errors import UserError

# GB/s that a GPU sends to other nodes: 200 Gb/s each, which clusters of A100 have and those of H100
# at least have.
ASSUMED_INTERCONNECT = 25.0


@dataclass(frozen=True)
class Device:
    """A GPU by its maker's data sheet.

    Attributes:
        name: as it stands in the name that CUDA gives.
        tflops: dense, in bf16.
        memory: GiB.
        link: GB/s that it sends to the others of its node: NVLink, or PCIe where it has none.
    """

    name: str
    tflops: float
    memory: float
    link: float


# The most specific name first.
DEVICES = (
    Device("B200", 2250.0, 180, 900),
    Device("GH200", 989.0, 96, 450),
    Device("H200", 989.0, 141, 450),
    Device("H100 PCIe", 756.0, 80, 64),
    Device("H100 NVL", 835.0, 94, 300),
    Device("H100", 989.0, 80, 450),
    Device("H800", 989.0, 80, 200),
    Device("A100", 312.0, 80, 300),
    Device("A800", 312.0, 80, 200),
    Device("L40S", 362.0, 48, 32),
    Device("L4", 121.0, 24, 32),
    Device("RTX 4090", 165.2, 24, 32),
    Device("RTX 3090", 71.0, 24, 32),
)


def known_device(name: str) -> Device | None:
    """The first of `DEVICES` whose name is part of `name`."""
    return next((device for device in DEVICES if device.name in name), None)


def device_by_option(text: str) -> Device:
    """A device as people name it: h100, h100-pcie, "RTX 4090".

    Raises:
        UserError: it is not listed.
    """
    wanted = text.lower().replace("-", " ").replace("_", " ").strip()
    for device in DEVICES:
        if wanted == device.name.lower():
            return device
    known = ", ".join(device.name.lower().replace(" ", "-") for device in DEVICES)
    raise UserError(f"device {text!r}: is not known; known are {known}")
