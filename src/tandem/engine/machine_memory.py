"""How much memory there is for the KV pool: of a device, or what this process may use of the machine."""

import torch

from tandem import cgroups


def total_bytes(device: str) -> int:
    """Of the device; for the CPU what this process may use of the machine."""
    if torch.device(device).type != "cpu":
        return torch.cuda.mem_get_info(device)[1]
    return cgroups.memory_bytes()


def bytes_left(device: str, *, weight_bytes: int) -> int:
    """Beside the weights, 0 where they take all. A device has them already; mapped ones only come to be there."""
    if torch.device(device).type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, total_bytes(device) - weight_bytes)
