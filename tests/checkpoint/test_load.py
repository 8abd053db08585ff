"""checkpoint.load: masters mapped from the file, and the skeleton's structure kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sample_loads import Net, is_mapped, kinds, saved

from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import disk_bytes_read, resident_bytes
from dynswap_ext.errors import ConfigError


@kinds
def test_factory_gets_mapped_masters_and_equal_outputs(kind: str, tmp_path: Path) -> None:
    reference = Net().eval()
    path = saved(reference, tmp_path / "weights", kind)
    model = checkpoint.load(Net, path).eval()
    assert all(is_mapped(parameter, path) for parameter in model.parameters())
    x = torch.randn(3, 4)
    assert torch.equal(model(x), reference(x))


@kinds
def test_nothing_is_read_but_headers(kind: str, tmp_path: Path) -> None:
    width = 1 << 20  # 36 MiB
    path = saved(Net(width), tmp_path / "weights", kind)
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # dirty pages cannot be dropped
    drop_file_cache(path)
    checkpoint.load(Net, saved(Net(), tmp_path / "small", kind))  # loads torch's code
    read, used = disk_bytes_read(), resident_bytes()
    model = checkpoint.load(lambda: Net(width), path)
    # The file has 36 MiB. To get `scale`, the factory is called once more, and makes the buffers of BatchNorm
    # (8 MiB). They are freed again, but malloc may keep their memory.
    assert disk_bytes_read() - read < 8 << 20
    assert resident_bytes() - used < 16 << 20
    assert model.first.weight.shape == (width, 4)


@kinds
def test_real_module_lets_its_weights_go(kind: str, tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "weights", kind)
    model = Net()
    assert checkpoint.load(model, path) is model
    assert all(is_mapped(parameter, path) for parameter in model.parameters())


def test_dtypes_are_the_files(tmp_path: Path) -> None:
    path = saved(Net().bfloat16(), tmp_path / "weights")
    assert checkpoint.load(Net, path).first.weight.dtype is torch.bfloat16


def test_requires_grad_is_the_skeletons(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "weights")

    def frozen() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    model = checkpoint.load(frozen, path)
    assert not model.first.weight.requires_grad and model.second.weight.requires_grad
    model(torch.randn(3, 4)).sum().backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None


def test_writing_to_a_master_leaves_the_file(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "weights")
    before = path.read_bytes()
    model = checkpoint.load(Net, path)
    with torch.no_grad():
        model.first.weight.fill_(7)
    assert path.read_bytes() == before


def test_unsaved_tensors_of_a_factory_are_made_again(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "weights")
    model = checkpoint.load(Net, path)
    assert torch.equal(model.scale, torch.full((4,), 2.0))
    assert torch.equal(model.offset, torch.arange(4.0))


def test_unsaved_buffer_of_a_meta_module_is_named(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "weights")
    with torch.device("meta"):
        skeleton = Net()
    with pytest.raises(ConfigError, match=r"scale, offset.*load\(lambda"):
        checkpoint.load(skeleton, path)
    assert skeleton.first.weight.is_meta  # as it was


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "w")
    with pytest.raises(ConfigError, match="returned a int"):
        checkpoint.load(lambda: 3, path)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="not a str"):
        checkpoint.load("model", path)  # type: ignore[arg-type]


def test_what_is_no_path_is_refused(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "w")
    with pytest.raises(ConfigError, match=r"path is of type Net; .* comes first: load\(model, path\)"):
        checkpoint.load(path, Net())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"path is of type OrderedDict; .*load_state_dict") as raised:
        checkpoint.load(Net(), Net().state_dict())  # type: ignore[arg-type]
    assert "tensor(" not in str(raised.value)
