"""What the formats share: mapping a range of a file, and how errors end."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from dynswap_ext.errors import SourceError

#: The remedy for a file that lacks something.
AGAIN = "download or copy it again"


def truncated(path: Path, expected: int, size: int, what: str) -> SourceError:
    """The error for a file that is shorter than `what` needs."""
    return SourceError(
        f"{path} is cut short: {what} needs {expected:,} bytes, the file has {size:,}; {AGAIN}"
    )


def map_file(path: Path, size: int) -> torch.UntypedStorage:
    """The file's first `size` bytes, mapped copy-on-write. Nothing is read."""
    storage = torch.UntypedStorage.from_file(str(path), False, size)
    return cast("torch.UntypedStorage", storage)  # torch's stub is wider


def mapped_tensor(
    storage: torch.UntypedStorage, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A contiguous tensor over bytes of a mapped file, aligned or not."""
    tensor = torch.empty(0, dtype=dtype)
    if nbytes > 0:
        # A slice, so that each tensor has a storage of just its bytes (torch.save writes storages whole).
        tensor.set_(storage[offset : offset + nbytes])
    return tensor.reshape(shape)
