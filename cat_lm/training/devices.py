"""GPUs with the numbers of their data sheets, and an assumed network bandwidth. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from cat_lm.core.errors import UserError

# GB/s that a GPU sends to other nodes: 200 Gb/s, as in clusters of A100. Those of H100 have at
# least as much.
ASSUMED_INTERCONNECT = 25.0


@dataclass(frozen=True)
class Device:
    """A GPU with the numbers of its data sheet.

    Attributes:
        name: a part of the name that CUDA reports.
        tflops: dense TFLOP/s in bf16.
        memory: GiB.
        link: GB/s to other GPUs of the node, by NVLink or else PCIe.
    """

    name: str
    tflops: float
    memory: float
    link: float


# More specific names come first, because the first match counts.
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
    """Return the first of `DEVICES` whose name is part of `name`; None for an unknown device."""
    return next((device for device in DEVICES if device.name in name), None)


def device_by_option(text: str) -> Device:
    """Return the device for a name as people write it: h100, h100-pcie, "RTX 4090".

    Raises:
        UserError: the device is not in `DEVICES`.
    """
    wanted = text.lower().replace("-", " ").replace("_", " ").strip()
    for device in DEVICES:
        if wanted == device.name.lower():
            return device
    known = ", ".join(device.name.lower().replace(" ", "-") for device in DEVICES)
    raise UserError(f"device {text!r}: is not known; known are {known}")
