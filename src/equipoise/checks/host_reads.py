"""What a captured CUDA graph does not allow, found on a CPU: operations that read values on the host."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FORBIDDEN = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "bincount", "equal"}


class HostReads(TorchDispatchMode):
    """Notes the operations that would make a GPU wait for the host, or shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, and perform it."""
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in FORBIDDEN or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
