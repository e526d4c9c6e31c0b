"""Whose device is which: of several workers each has its own, one behind the other from that which --device names."""

import torch

from tandem.engine.documents import ModelError


def own_device(device: str, worker: int) -> str:
    """Of this worker, by its number on its host. What has no number is what all of them have."""
    kind, _, first = device.partition(":")
    return f"cuda:{int(first or 0) + worker}" if kind == "cuda" and (first or "0").isdecimal() else device


def take(device: str, *, worker: int = 0, workers: int = 1) -> str:
    """This worker's, of so many on its host. Kernels of Triton, CUDA graphs and NCCL go to the device that is the
    current one of this thread. Raises ModelError.
    """
    first, own = own_device(device, 0), own_device(device, worker)
    if device != "cpu" and device.partition(":")[0] != "cuda":
        raise ModelError(f"the device {device!r} is not known; use cpu, cuda or cuda:N")
    try:
        if device != "cpu" and workers > 1:
            _refuse_too_few(first, workers)
        torch.empty(0, device=own)
        if own != "cpu":
            torch.cuda.set_device(own)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise ModelError(f"the device {own} cannot be used ({cause}); use --device cpu") from None
    return own


def _refuse_too_few(first: str, workers: int) -> None:
    count = torch.cuda.device_count()
    if torch.device(first).index + workers > count:
        raise ModelError(
            f"{workers} workers need a device each, from {first} on, and this machine has {count}; "
            "lower --tp-size, --pp-size, --attn-cp-size or --dp-size"
        )
