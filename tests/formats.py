"""Small files in the formats that data sets really come in."""

import gzip
import io
import pathlib
import struct
import tarfile
import zipfile

import numpy as np

_IDX_TYPES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, _IDX_TYPES[array.dtype.str[1:]], array.ndim])
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return head + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path: pathlib.Path, array: np.ndarray) -> pathlib.Path:
    data = idx_bytes(array)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def string(text: bytes) -> bytes:
    """A Python 2 string, as protocol 2 writes it."""
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"e"


def byte_array(array: np.ndarray) -> bytes:
    shape = b"".join(b"J" + struct.pack("<i", size) for size in array.shape)
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return empty + b"(K\x01(" + shape + b"t" + dtype + b"\x89" + string(array.tobytes()) + b"tb"


def pickled(items: dict[bytes, bytes]) -> bytes:
    """A dictionary as Python 2 pickled it, with its values pickled already."""
    return b"\x80\x02}q\x01(" + b"".join(string(key) + value for key, value in items.items()) + b"u."


def cifar_batch(pixels: np.ndarray, labels: dict[bytes, list[int]]) -> bytes:
    names = b"](" + b"".join(string(b"picture_%d.png" % row) for row in range(len(pixels))) + b"e"
    lists = {key: numbers(values) for key, values in labels.items()}
    return pickled({b"batch_label": string(b"batch"), **lists, b"data": byte_array(pixels), b"filenames": names})


def tar_bytes(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_bytes(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()
