"""Reads and writes the safetensors format: a header in JSON, then the bytes of each tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000


def save_safetensors(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Writes the file under a temporary name and renames it, so that ``path`` never holds half a file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor '{name}' of dtype {tensor.dtype} has no name in the safetensors format")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = f"{os.fspath(path)}.unfinished"
    with open(unfinished, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{os.fspath(path)} is not a safetensors file")
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    found: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        expected = torch.Size(entry["shape"]).numel() * (dtype.itemsize if dtype else 0)
        if dtype is None or not 0 <= begin <= end <= len(data) or end - begin != expected:
            raise ValueError(
                f"{os.fspath(path)}: tensor '{name}' ({entry['dtype']} {entry['shape']}) is damaged or unknown"
            )
        tensor = torch.empty(entry["shape"], dtype=dtype, device="cpu")
        if end > begin:
            tensor = torch.frombuffer(data[begin:end], dtype=dtype).reshape(entry["shape"])
        found[name] = tensor
    return found


__all__ = ["load_safetensors", "save_safetensors"]
