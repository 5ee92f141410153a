"""Registration of an op in torch's `dustin` namespace, so that models with it can be exported."""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("dustin", "DEF")


def define(
    name: str,
    schema: str,
    reference: Callable,
    *,
    shape: Callable,
    cpu: Callable | None = None,
) -> torch._ops.OpOverload:
    """Define `torch.ops.dustin.<name>` and return it as a callable.

    Parameters
    ----------
    name, schema : the op's name and its signature in torch's schema language
    reference : the specification, plain torch, run wherever nothing faster is registered
    shape : the same signature on meta tensors, for `torch.export`
    cpu : a faster version for CPU tensors, held to the reference by `tests/ops`
    """
    # `define`/`impl` costs about 3 µs a call; the Python decorator `custom_op` 13–23 µs.
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"dustin::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.dustin, name).default
