"""Opens a checkpoint of any format: told apart by content, one file here for each."""

from __future__ import annotations

import difflib
from pathlib import Path

from dynswap_ext.checkpoint.formats import gguf, safetensors_file, torch_zip
from dynswap_ext.checkpoint.formats.common import AGAIN
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import SourceError

__all__ = ["open_checkpoint"]

#: How files begin that people take for checkpoints, and what to do with them.
_RELATED: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF", "an HDF5 file; convert it with safetensors.torch.save_file(tensors, path)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
    (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19",
        "a pickle in the format of torch before 1.6; rewrite it once with "
        "torch.save(torch.load(path, weights_only=True), new_path)",
    ),
)


def open_checkpoint(path: Path, *, weights_only: bool = True) -> Checkpoint:
    """Open a checkpoint; nothing is read but headers.

    Parameters
    ----------
    path
        A safetensors file or a zip file written by ``torch.save``, told apart by content.
    weights_only
        False lets a pickle run code: only for files from somebody whose code you would run.

    Raises
    ------
    SourceError
        The file is not there, cut short, or of another format. Names the file and the remedy.
    """
    head = _head(path)
    if torch_zip.matches(head):
        return torch_zip.TorchZip(path, weights_only=weights_only)
    if safetensors_file.matches(head):
        return safetensors_file.SafetensorsFile(path)
    if gguf.matches(head):
        return gguf.GGUFFile(path)
    for start, meaning in _RELATED:
        if head.startswith(start):
            raise SourceError(f"{path} is {meaning}")
    if not head:
        raise SourceError(f"{path} is empty; {AGAIN}")
    if len(head) < 9:
        raise SourceError(
            f"{path} is cut short: it has {len(head)} bytes, no checkpoint is so small; {AGAIN}"
        )
    raise SourceError(
        f"{path} is neither a safetensors file nor a zip file of torch.save (it begins with {head[:8]!r}); "
        "save the weights with safetensors.torch.save_file(model.state_dict(), path)"
    )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32)
    except FileNotFoundError as error:
        raise SourceError(f"no such file: {path}{_neighbours(path)}") from error
    except IsADirectoryError as error:
        found = sorted(
            entry.name for suffix in ("*.safetensors", "*.pt", "*.pth") for entry in path.glob(suffix)
        )
        inside = f"; it has {', '.join(found[:5])}" if found else ""
        raise SourceError(f"{path} is a folder; name the checkpoint file itself{inside}") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
