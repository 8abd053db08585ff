"""Folders of torch.distributed.checkpoint: they are read as they were saved, and no code of theirs runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_checkpoints import Canary, assert_same, refused, save_distributed, state, weights
from torch.distributed.checkpoint.metadata import Metadata

from dynswap_ext import checkpoint
from dynswap_ext.checkpoint.formats import open_checkpoint


class TestSaved:
    def test_bytes_are_mapped_from_where_they_lie(self, tmp_path: Path) -> None:
        content = {**state(), "half": torch.ones(3).half(), "eighth": torch.ones(4).to(torch.float8_e5m2)}
        opened = open_checkpoint(save_distributed(content, tmp_path))
        for name, tensor in content.items():
            entry = opened.entries[name]
            assert entry.offset is not None and entry.file == tmp_path / "__0_0.distcp"
            raw = entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert opened[name].dtype == tensor.dtype
            assert torch.equal(opened[name].float(), tensor.float())

    def test_named_by_its_metadata(self, tmp_path: Path) -> None:
        save_distributed(state(), tmp_path)
        assert_same(weights(open_checkpoint(tmp_path / ".metadata")), state())
        refused(tmp_path / "__0_0.distcp", f"part of a folder.*name the folder, {tmp_path}")

    def test_several_files(self, tmp_path: Path) -> None:
        writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path, thread_count=3)
        save_distributed(state(), tmp_path, storage_writer=writer)
        opened = open_checkpoint(tmp_path)
        assert len(opened.files) == 3
        assert_same(weights(opened), state())

    def test_not_in_row_major_order(self, tmp_path: Path) -> None:
        content = {"turned": torch.arange(6.0).reshape(2, 3).t(), "none": torch.zeros(0, 2)}
        opened = open_checkpoint(save_distributed(content, tmp_path))
        assert opened.entries["turned"].offset is None
        assert_same(weights(opened), content)

    @pytest.mark.parametrize(
        "content",
        [
            {"model": state(), "optimizer": {"state": {"w": {"exp_avg": torch.zeros(3)}}, "lr": [0.1]}},
            {"app": {"model": state(), "optim": {"state.w.step": torch.tensor(1.0), "lr": 0.1}}},
            {**state(), "optimizer": {"lr": 0.1}, "train_state": {"step": torch.tensor(3)}, "epoch": 3},
        ],
        ids=["beside an optimizer", "of a Stateful", "at the top"],
    )
    def test_the_model_is_found(self, content: dict[str, Any], tmp_path: Path) -> None:
        opened = open_checkpoint(save_distributed(content, tmp_path))
        assert_same(weights(opened), state())
        assert not opened.objects

    def test_two_models_are_ambiguous(self, tmp_path: Path) -> None:
        save_distributed({"model": state(), "ema": state()}, tmp_path)
        refused(tmp_path, r"2 state dicts \(ema, model\)|2 state dicts \(model, ema\)")

    def test_extra_state(self, tmp_path: Path) -> None:
        extra = {"scales": [torch.ones(2), {"of": torch.zeros(1)}], "name": "fp8"}
        save_distributed({"model": {**state(), "a._extra_state": extra, "b._extra_state": 7}}, tmp_path)
        opened = open_checkpoint(tmp_path)
        assert opened["b._extra_state"] == 7 and opened["a._extra_state"]["name"] == "fp8"
        assert torch.equal(opened["a._extra_state"]["scales"][0], torch.ones(2))
        assert_same(weights(opened), state())

    def test_load(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        save_distributed({"model": model.state_dict()}, tmp_path)
        loaded = checkpoint.load(lambda: torch.nn.Linear(3, 2), tmp_path)
        assert_same(dict(loaded.named_parameters()), dict(model.named_parameters()))


_WRITER = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
shapes = {"rows": (5, 3), "columns": (4, 7), "one": (1, 4), "all": (3,)}
wholes = {name: torch.randn(shape) for name, shape in shapes.items()}
placements = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "all": Replicate()}
state = {name: distribute_tensor(whole, mesh, [placements[name]]) for name, whole in wholes.items()}
model = torch.nn.Linear(3, 5)
wholes.update({"linear." + name: value.detach().clone() for name, value in model.state_dict().items()})
fully_shard(model, mesh=mesh)
state.update({"linear." + name: value for name, value in model.state_dict().items()})
dcp.save({"model": state, "step": rank}, checkpoint_id=folder)
if rank == 0:
    torch.save(wholes, folder + ".expected")
dist.barrier()
os._exit(0)  # torch's threads may abort while the process is torn down
"""


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(rank), str(folder)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
        yield folder
    finally:
        for writer in writers:
            writer.kill()


@pytest.mark.slow
def test_chunks_of_two_processes(of_two_processes: Path) -> None:
    opened = open_checkpoint(of_two_processes)
    expected = torch.load(f"{of_two_processes}.expected")
    assert_same(weights(opened), expected)
    assert len(opened.files) == 2
    for name in ("rows", "columns", "linear.weight", "linear.bias"):
        assert opened.entries[name].offset is None  # in two places
    for name in ("one", "all"):
        assert opened.entries[name].offset is not None  # in one place, whole
    assert opened["rows"].data_ptr() != opened["rows"].data_ptr()


# ---- what is not as it was saved ---------------------------------------------------------------------------


def _edited(folder: Path, edit: Callable[[Metadata], object]) -> Path:
    path = save_distributed(state(), folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def _chunk(metadata: Metadata) -> Any:
    listing: Any = metadata.state_dict_metadata["embed.weight"]
    return listing.chunks[0]


def _info(metadata: Metadata) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "embed.weight")


def _half(metadata: Metadata) -> None:
    _chunk(metadata).sizes = torch.Size([2, 3])


def _twice(metadata: Metadata) -> None:
    listing: Any = metadata.state_dict_metadata["embed.weight"]
    listing.size = torch.Size([8, 3])
    listing.chunks.append(listing.chunks[0])


def _huge(metadata: Metadata) -> None:
    listing: Any = metadata.state_dict_metadata["embed.weight"]
    listing.size = _chunk(metadata).sizes = torch.Size([1 << 40, 3])


def _quantised(metadata: Metadata) -> None:
    listing: Any = metadata.state_dict_metadata["embed.weight"]
    listing.properties.dtype = torch.quint8
    listing.chunks.append(listing.chunks[0])


EDITS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "path out of the folder": (
        lambda m: setattr(_info(m), "relative_path", "../x"),
        r"'embed.weight' is in '\.\./x'",
    ),
    "absolute path": (
        lambda m: setattr(_info(m), "relative_path", "/etc/passwd"),
        "not a file in its folder",
    ),
    "NUL in a path": (lambda m: setattr(_info(m), "relative_path", "a\0"), "not a file in its folder"),
    "missing file": (
        lambda m: setattr(_info(m), "relative_path", "__1_0.distcp"),
        "no such file.*did you mean",
    ),
    "past the end": (lambda m: setattr(_info(m), "length", 1 << 40), "cut short: 'embed.weight' needs"),
    "not where it is": (lambda m: setattr(_info(m), "offset", 700), "damaged where 'embed.weight' is"),
    "no integer": (lambda m: setattr(_info(m), "offset", 0.0), "'embed.weight' has a float for offset"),
    "negative": (lambda m: setattr(_info(m), "offset", -1), "'embed.weight' has bytes -1"),
    "no place": (lambda m: m.storage_data.clear(), "'embed.weight' has no place"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "it has a NoneType for storage_data"),
    "compressed": (lambda m: setattr(_info(m), "transform_descriptors", ["zstd"]), "through an extension"),
    "a part missing": (_half, "'embed.weight' has chunks of 6 elements, and 12 elements"),
    "an overlap": (_twice, "'embed.weight' has chunks that overlap"),
    "out of bounds": (lambda m: setattr(_chunk(m), "sizes", torch.Size([5, 3])), "ends outside of"),
    "more than was stored": (_huge, "has 13,194,139,533,312 bytes at .*, stored in"),
    "a dtype with a scale": (_quantised, "'embed.weight' has the dtype torch.quint8"),
    "fewer dimensions": (lambda m: setattr(_chunk(m), "sizes", torch.Size([12])), "a chunk of 1 dimensions"),
    "of another save": (
        lambda m: setattr(m.state_dict_metadata["embed.weight"].properties, "dtype", torch.int32),
        "does not have for 'embed.weight' the torch.int32 tensor",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_wrong_metadata(case: str, tmp_path: Path) -> None:
    edit, pattern = EDITS[case]
    refused(_edited(tmp_path, edit), pattern)


def test_cut_files(tmp_path: Path) -> None:
    save_distributed(state(), tmp_path)
    for name, pattern in (("__0_0.distcp", "cut short: '.*' needs.*again"), (".metadata", "it is.*again")):
        content = (tmp_path / name).read_bytes()
        for kept in (0, 1, 100, len(content) - 1):
            (tmp_path / name).write_bytes(content[:kept])
            refused(tmp_path, pattern)
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".metadata").unlink()
    refused(tmp_path, r"no \.metadata, which is written last: the save did not finish")


def test_code_does_not_run(tmp_path: Path) -> None:
    folder = _edited(tmp_path / "saved", lambda m: setattr(m, "planner_data", Canary(tmp_path / "canary")))
    refused(folder, r"asks for posix\.mkdir\. What it asks for is not run")
    refused(folder, "is not run", weights_only=False)  # the metadata never needs it
    assert not (tmp_path / "canary").exists()


def test_code_in_an_item_runs_only_when_said(tmp_path: Path) -> None:
    content = {"model": {**state(), "a._extra_state": Canary(tmp_path / "canary")}}
    folder = save_distributed(content, tmp_path / "saved")
    refused(folder, "where 'a._extra_state' is.* holds more than tensors")
    assert not (tmp_path / "canary").exists()
    open_checkpoint(folder, weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"r\xff\xff\xff\xff",  # memo entry four billion
        b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little"),  # bytes of an exbibyte
        b"\x80\x04\x96" + (1 << 60).to_bytes(8, "little"),
        b"\x80\x04" + b"(" * 10_000 + b".",
        b"cos\nsystem\n(U\x04true\ntR.",
        b"}.",
    ],
    ids=repr,
)
def test_pickles_that_are_no_metadata(content: bytes, tmp_path: Path) -> None:
    save_distributed(state(), tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    refused(tmp_path, "is not the metadata that|is damaged: it has")
