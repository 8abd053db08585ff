"""Coverage-guided fuzzing of the code that reads checkpoint headers, with atheris (libFuzzer).

    make fuzz FUZZ_SECONDS=600
    python tests/fuzz/fuzz_headers.py -max_total_time=600     arguments of libFuzzer
    python tests/fuzz/fuzz_headers.py build/fuzz/crash-...    one input again

An input is a byte that chooses the file to damage, and the content of that file. Whatever it is, opening the
checkpoint and asking for each tensor's shape gives shapes or a SourceError that names the file. The corpus
in build/fuzz/corpus begins with small checkpoints that this script makes. Inputs that fail go to build/fuzz.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1] / "checkpoint"), str(Path(__file__).parents[2])]

with atheris.instrument_imports(include=["zipfile"], enable_loader_override=False):
    import zipfile  # noqa: F401  before torch imports it: it reads directories for us

# Not instrumented: an instrumented torch takes a minute to import.
from torch._weights_only_unpickler import Unpickler  # noqa: E402

with atheris.instrument_imports(include=["dynswap_ext"], enable_loader_override=False):
    from sample_checkpoints import SAMPLES, Sample, look
Unpickler.load = atheris.instrument_func(Unpickler.load)

_WORK = Path("build/fuzz")
#: The longest input. Longer ones find nothing more.
_LONGEST = 8192
_WORDS = (
    '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"weight_map"', '"F32"', '"F8_E8M0"', "NaN",
    "-1", "9223372036854775807", "1e3", "../", "data.pkl", "byteorder", "PK\\x03\\x04", "PK\\x01\\x02",
    "PK\\x05\\x06", "PK\\x06\\x06",
    "dynswap_lossless", "tensors", "version", "ctorch._utils\\x0a_rebuild_tensor_v2\\x0a", "\\x93\\x94R",
)  # fmt: skip


def _header_only(content: bytes) -> bytes:
    """Return a safetensors file with this header, whose length is right, and 64 bytes of data."""
    return len(content).to_bytes(8, "little") + content + bytes(64)


def _targets(folder: Path) -> list[tuple[Sample, Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """Return the samples, each with functions that turn an input into the file and the file into an input."""
    targets: list[tuple[Sample, Callable[[bytes], bytes], Callable[[bytes], bytes]]] = []
    for name, make in SAMPLES.items():
        (folder / name).mkdir()
        targets.append((make(folder / name), bytes, bytes))
    (folder / "header").mkdir()
    sample = SAMPLES["safetensors"](folder / "header")
    targets.append((sample, _header_only, lambda file: file[8 : 8 + int.from_bytes(file[:8], "little")]))
    return targets


def main() -> None:
    corpus, folder = _WORK / "corpus", _WORK / "files"
    corpus.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    targets = _targets(folder)
    for number, (sample, _, to_input) in enumerate(targets):
        seed = bytes([number]) + to_input(sample.damaged.read_bytes())
        (corpus / f"seed-{number}").write_bytes(seed)
    (_WORK / "dictionary").write_text("".join(f'"{_quoted(word)}"\n' for word in _WORDS))

    def run(data: bytes) -> None:
        if not data:
            return
        sample, to_file, _ = targets[data[0] % len(targets)]
        sample.damaged.write_bytes(to_file(data[1:]))
        look(sample.opened)

    ours = [
        f"-dict={_WORK / 'dictionary'}",
        f"-artifact_prefix={_WORK}/",
        f"-max_len={_LONGEST}",
        "-timeout=20",
    ]
    given = sys.argv[1:]
    inputs = [] if any(not argument.startswith("-") for argument in given) else [str(corpus)]
    atheris.Setup([sys.argv[0], *ours, *given, *inputs], run)
    atheris.Fuzz()


def _quoted(word: str) -> str:
    return word.replace('"', '\\"')


if __name__ == "__main__":
    main()
