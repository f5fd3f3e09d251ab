"""Files of tensors: what the safetensors package reads and writes, whole or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch as package
import torch
from torch import Tensor

from planner.errors import InputError
from planner.executor.checkpoint.tensor_file import each_tensor, write_tensors

TENSORS = {
    "layer.weight": torch.randn(3, 4),
    "steps": torch.tensor(2.5, dtype=torch.float64),
    "counts": torch.arange(5),
    "empty": torch.empty(0, 3),
    "mask": torch.tensor([True, False, True]),
    "half": torch.randn(2, 2).to(torch.bfloat16),
    "last channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
    "complex": torch.randn(3, dtype=torch.complex64),
    "eight bits": torch.randn(4).to(torch.float8_e5m2),
}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def test_the_package_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    write_tensors(tmp_path / "ours", TENSORS)
    assert_same(TENSORS, package.load_file(tmp_path / "ours"))
    package.save_file(
        {name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs"
    )
    assert_same(TENSORS, dict(each_tensor(tmp_path / "theirs")))


def test_some_tensors_of_a_file(tmp_path: Path) -> None:
    written = write_tensors(tmp_path / "file", TENSORS)
    assert_same({"odd": TENSORS["odd"]}, dict(each_tensor(tmp_path / "file", ["odd"], written)))
    with pytest.raises(InputError, match="not contain tensor nothing"):
        dict(each_tensor(tmp_path / "file", ["nothing"], written))


def test_any_changed_byte_and_any_length_but_the_right_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = write_tensors(path, TENSORS)
    content = path.read_bytes()
    for position in range(0, len(content), 37):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]
        )
        with pytest.raises(InputError, match=r"is corrupt: its SHA-256"):
            dict(each_tensor(path, None, written))
        path.write_bytes(content[:position])
        with pytest.raises(
            InputError, match=rf"has {position} bytes, but {len(content)} were written"
        ):
            dict(each_tensor(path, None, written))


def test_without_a_checksum_a_mistake_is_still_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (
        b"",
        b"abc",
        b"\xff" * 20,
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x02\0\0\0\0\0\0\0[]",
        path.name.encode() * 9,
    ):
        path.write_bytes(content)
        if content.endswith(b"{}"):
            assert dict(each_tensor(path)) == {}
            continue
        with pytest.raises(InputError, match="is not a complete safetensors file"):
            dict(each_tensor(path))
    header = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}  '
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(InputError, match="not fully covered"):
        dict(each_tensor(path))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        dict(each_tensor(tmp_path / "none"))


def test_a_type_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'x' is a tensor of torch\.complex128"):
        write_tensors(tmp_path / "file", {"x": torch.zeros(2, dtype=torch.complex128)})
