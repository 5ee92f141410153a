"""What a TensorRT session asks of CUDA, through torch: memory, streams, and a GPU at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class TensorRTError(RuntimeError):
    """What TensorRT, its plugins or the GPU under them cannot do; the message says what to do."""


def check_device(device: torch.device, compute_capability: str | None = None) -> None:
    """Refuse a device that an engine cannot run on, before TensorRT is imported.

    Parameters
    ----------
    compute_capability : "9.0", what the engine was built for; None for any

    Raises
    ------
    TensorRTError
        There is no such GPU.
    ValueError
        No CUDA device, or one of another kind.
    """
    if device.type != "cuda":
        raise ValueError(f"TensorRT engines run on an NVIDIA GPU, not on {device}: use cuda")
    if not torch.cuda.is_available():
        why = "torch finds no usable NVIDIA GPU: check the driver with nvidia-smi"
        if torch.version.cuda is None:
            why = "this torch is built without CUDA: install one with it"
        raise TensorRTError(f"TensorRT engines need an NVIDIA GPU, and {why}")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise TensorRTError(f"there is no {device}: this machine has cuda:0 to cuda:{count - 1}")
    found = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if compute_capability is not None and found != compute_capability:
        raise ValueError(
            f"the engine was built for compute capability {compute_capability}, "
            f"{torch.cuda.get_device_name(device)} has {found}: build it again on such a machine"
        )


class Gpu:
    """A CUDA device as sessions use it; tests put another in its place.

    Parameters
    ----------
    device : a CUDA device
    """

    alignment = 256
    """Bytes, of every address that TensorRT is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._aside: torch.cuda.Stream | None = None

    def free(self) -> tuple[int, int]:
        """Bytes that TensorRT could take, and bytes that there are."""
        torch.cuda.empty_cache()  # TensorRT cannot use what torch's allocator holds back
        free, total = torch.cuda.mem_get_info(self.device)
        return free, total

    def allocate(self, size: int) -> Tensor:
        """`size` bytes, uninitialised.

        Raises
        ------
        MemoryError
            There is not that much.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def capturing(self) -> bool:
        """Whether what is queued now is recorded for a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def stream(self) -> Iterator[int]:
        """A handle of the stream to queue on, in order with torch's current stream.

        On CUDA's default stream TensorRT would wait for the whole device around every pass: a
        stream aside takes its place there, which waits for it and is waited for.
        """
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            if current.cuda_stream:
                yield current.cuda_stream
                return
            if self._aside is None:
                self._aside = torch.cuda.Stream(self.device)
            self._aside.wait_stream(current)
            try:
                yield self._aside.cuda_stream
            finally:
                current.wait_stream(self._aside)

    def synchronize(self) -> None:
        """Wait for everything queued so far."""
        torch.cuda.synchronize(self.device)
