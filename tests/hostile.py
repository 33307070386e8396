"""A corpus of files made to do harm, and the proof that they cannot: run as a program, it reports what happened.

Every case has a file and the function a user would open it with. `python hostile.py make FOLDER` makes the files.
`python hostile.py open FOLDER` opens all of them while an audit hook watches, and whatever would run code or write
outside the folder is written down.
"""

import codecs
import gzip
import importlib.util
import io
import json
import os
import pathlib
import pickle
import resource
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
from formats import cifar_batch, pickled, string, tar_bytes, zip_bytes

from millstream.datasets import CelebADataset
from millstream.datasets._archive import extract
from millstream.datasets._cifar import _read_batch
from millstream.sources.csv import read_csv
from millstream.sources.idx import map_idx
from millstream.sources.image_folder import ImageFolderSource, decode_image
from millstream.sources.npy import map_numpy_file

Case = Callable[[], object]

MEMBER = "data/a"
HONEST = {MEMBER: b"honest"}
ESCAPE = "outside"  # a folder next to the one that may be written


class Bomb:
    """What a hostile pickle wants to be: a call of `os.system` that leaves a mark."""

    def __init__(self, mark: pathlib.Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def tar_with(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore
        for info, data in members:
            info.size = len(data) or info.size
            tar.addfile(info, io.BytesIO(data) if data else None)
        tar.addfile(named(MEMBER, size=6), io.BytesIO(b"honest"))
    return buffer.getvalue()


def named(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def huge_tar() -> bytes:
    """A header that claims eight gigabytes, and nothing after it."""
    info = named(MEMBER, size=(1 << 33) - 1)
    return info.tobuf(tarfile.USTAR_FORMAT) + bytes(1024)


def zip_member(name: str = MEMBER, *, mode: int = 0, data: bytes = b"x", kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        info = zipfile.ZipInfo("placeholder")
        info.filename, info.external_attr, info.compress_type = name, mode << 16, kind
        file.writestr(info, data)
        if name != MEMBER:
            file.writestr(MEMBER, b"honest")
    return buffer.getvalue()


def twice_zip() -> bytes:
    return zip_bytes({"data/a": b"one", "data/b": b"two"}).replace(b"data/b", b"data/a")


def patched(data: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    """The bytes with others in the place `offset` bytes after the first signature."""
    at = data.index(signature) + offset
    return data[:at] + value + data[at + len(value) :]


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "tar-parent": lambda: tar_with((named(f"../{ESCAPE}/x"), b"evil")),
    "tar-deep-parent": lambda: tar_with((named(f"a/b/../../../{ESCAPE}/x"), b"evil")),
    "tar-absolute": lambda: tar_with((named("/tmp/millstream-evil"), b"evil")),
    "tar-symlink": lambda: tar_with((named("data/link", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "tar-symlink-folder": lambda: tar_with(
        (named("data", tarfile.SYMTYPE, f"../{ESCAPE}"), b""), (named("data/x"), b"evil")
    ),
    "tar-member-is-link": lambda: tar_with((named(MEMBER, tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "tar-hardlink": lambda: tar_with((named("data/link", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    "tar-device": lambda: tar_with((named("data/zero", tarfile.CHRTYPE), b"")),
    "tar-fifo": lambda: tar_with((named("data/pipe", tarfile.FIFOTYPE), b"")),
    "tar-sparse": lambda: tar_with((named("data/sparse", tarfile.GNUTYPE_SPARSE), b"")),
    "tar-twice": lambda: tar_with((named(MEMBER), b"evil")),
    "tar-twice-by-case": lambda: tar_with((named("DATA/A"), b"evil")),
    "tar-backslash": lambda: tar_with((named("..\\evil"), b"evil")),
    "tar-drive": lambda: tar_with((named("C:/evil"), b"evil")),
    "tar-newline": lambda: tar_with((named("data/a\nb"), b"evil")),
    "tar-bomb": lambda: tar_with((named("data/zeros"), bytes(40 << 20))),
    "tar-many": lambda: tar_bytes({f"data/{number}": b"" for number in range(1500)} | HONEST, "w"),
    "tar-huge-claim": huge_tar,
    "tar-cut": lambda: tar_bytes(HONEST)[:-20],
    "tar-other": lambda: tar_bytes({"data/b": b"x"}),
    "zip-parent": lambda: zip_member(f"../{ESCAPE}/x"),
    "zip-absolute": lambda: zip_member("/tmp/millstream-evil"),
    "zip-drive": lambda: zip_member("C:\\evil"),
    "zip-nul": lambda: zip_member("data/a\0.txt"),
    "zip-symlink": lambda: zip_member(mode=0o120777, data=b"/etc/passwd"),
    "zip-device": lambda: zip_member(mode=0o020666),
    "zip-bomb": lambda: zip_member(data=bytes(40 << 20)),
    "zip-lzma": lambda: zip_member(kind=zipfile.ZIP_LZMA),
    "zip-twice": twice_zip,
    "zip-encrypted": lambda: patched(zip_member(), b"PK\x01\x02", 8, b"\x01\x00"),
    "zip-wrong-crc": lambda: patched(patched(zip_member(), b"PK\x01\x02", 16, b"evil"), b"PK\x03\x04", 14, b"evil"),
    "zip-two-names": lambda: zip_member().replace(b"data/a", b"data/b", 1),
    "no-archive": lambda: b"<html>not found</html>",
}


def npy(header: bytes | str, body: bytes = b"\0" * 64, version: int = 1, size: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    length = (len(text) if size is None else size).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def described(shape: str, descr: str = "'<f8'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def object_npy(mark: pathlib.Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb(mark)], object), allow_pickle=True)
    return buffer.getvalue()


def npz_outside() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.zeros(4))
    return patched(buffer.getvalue(), b"PK\x03\x04", 28, b"\xff\xff")  # the extra field now reaches past the end


def npz_bomb() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.zeros(40 << 20, np.uint8))
    return buffer.getvalue()


def headers(mark: pathlib.Path) -> dict[str, Callable[[], bytes]]:
    code = f"__import__('os').system('touch {mark}')"
    return {
        "npy-terabytes": lambda: npy(described("(1099511627776, 4096)")),
        "npy-wraps-to-nothing": lambda: npy(described("(4294967296, 4294967296, 16)", "'|u1'"), b""),
        "npy-negative": lambda: npy(described("(-1, -8)")),
        "npy-no-rows": lambda: npy(described("(0,)"), b""),
        "npy-float-shape": lambda: npy(described("(8.0,)")),
        "npy-bool-shape": lambda: npy(described("(True, 8)")),
        "npy-objects": lambda: object_npy(mark),
        "npy-code-as-shape": lambda: npy(described(code)),
        "npy-code-as-header": lambda: npy(code),
        "npy-nested": lambda: npy("(" * 9000),
        "npy-long-header": lambda: npy(described("(8,)"), version=2, size=0xFFFFFFFF),
        "npy-version": lambda: npy(described("(8,)"), version=9),
        "npy-records": lambda: npy(described("(8,)", "[('x', '|O')]")),
        "npy-many-axes": lambda: npy(described(f"({'1, ' * 70})", "'|u1'"), b"\0"),
        "npy-cut": lambda: npy(described("(8,)"), b"\0" * 63),
        "npz-objects": lambda: zip_bytes({"x.npy": object_npy(mark)}),
        "npz-outside": npz_outside,
        "npz-bomb": npz_bomb,
        "npz-evil-name": lambda: zip_bytes({f"../{ESCAPE}/x": b"evil"}),
    }


def idx(head: list[int], sizes: list[int], body: bytes = b"") -> bytes:
    return bytes(head) + b"".join(struct.pack(">I", size) for size in sizes) + body


IDX: dict[str, Callable[[], bytes]] = {
    "idx-terabytes": lambda: idx([0, 0, 14, 3], [0xFFFFFFFF] * 3, b"x"),
    "idx-many-axes": lambda: idx([0, 0, 8, 255], [1] * 255, b"x"),
    "idx-no-header": lambda: idx([0, 0, 8, 255], [1] * 3),
    "idx-unknown-type": lambda: idx([0, 0, 99, 1], [1], b"x"),
    "idx-too-long": lambda: idx([0, 0, 8, 1], [1], b"xy"),
    "idx-bomb.gz": lambda: gzip.compress(idx([0, 0, 8, 1], [40 << 20], bytes(40 << 20))),
    "idx-claim.gz": lambda: gzip.compress(idx([0, 0, 8, 3], [0xFFFFFFFF] * 3)),
    "idx-no-gzip.gz": lambda: b"\x1f\x8bnot really",
}


def laughs() -> bytes:
    """A tuple of tuples of tuples that has 2**60 leaves, as the key of a dictionary."""
    doubled = b"".join(b"q%ch%ch%c\x86" % (level, level, level) for level in range(60))
    return b"\x80\x02}()" + doubled.replace(b"q%c" % 0, b"q\x00", 1) + b"Nu."


def pickles(mark: pathlib.Path) -> dict[str, Callable[[], bytes]]:
    command = string(f"touch {mark}".encode())
    objects = b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    return {
        "pickle-system": lambda: pickled({b"data": b"cos\nsystem\n" + command + b"\x85R"}),
        **{
            f"pickle-protocol-{protocol}": lambda protocol=protocol: pickle.dumps(Bomb(mark), protocol)
            for protocol in (0, 2, 4)
        },
        "pickle-eval": lambda: pickled({b"data": b"c__builtin__\neval\n" + string(b"1+1") + b"\x85R"}),
        "pickle-instance": lambda: b"\x80\x02(" + command + b"ios\nsystem\n.",
        "pickle-object": lambda: b"\x80\x02(cos\nsystem\n" + command + b"o.",
        "pickle-extension": lambda: b"\x80\x02\x82\x01.",
        "pickle-persistent": lambda: b"\x80\x02" + command + b"Q.",
        "pickle-object-array": lambda: pickled(
            {b"data": empty + b"(K\x01K\x01\x85" + objects + b"\x89](" + command + b"etb"}
        ),
        "pickle-big-array": lambda: pickled(
            {b"data": empty + b"(K\x01J\xff\xff\xff\x7f\x85" + dtype + b"\x89U\x01xtb"}
        ),
        "pickle-big-empty-array": lambda: pickled(
            {b"data": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01b\x87R"}
        ),
        "pickle-big-string": lambda: b"\x80\x02T\xff\xff\xff\x7fx.",
        "pickle-big-memo": lambda: b"\x80\x02}r\xff\xff\xff\xff.",
        "pickle-build-on-name": lambda: b"\x80\x02cnumpy\nndarray\n}b.",
        "pickle-laughs": laughs,
        "pickle-empty-stack": lambda: b"\x80\x02R.",
        "pickle-cut": lambda: cifar_batch(np.zeros((1, 3072), np.uint8), {b"labels": [1]})[:-9],
    }


PARTITIONS = {
    "list-parent": f"../{ESCAPE}/x.jpg 0\n",
    "list-absolute": "/etc/passwd 0\n",
    "list-backslash": "..\\..\\x.jpg 0\n",
    "list-drive": "C:x.jpg 0\n",
    "list-no-split": "000001.jpg 7\n",
}


def png_claiming(width: int, height: int) -> bytes:
    """A PNG file whose header claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def decode(path: pathlib.Path) -> object:
    with path.open("rb") as file:
        return decode_image(str(path), file)


PICTURES: dict[str, Callable[[], bytes]] = {
    "picture-bomb": lambda: png_claiming(60_000, 60_000),
    "picture-program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n",
}


def corpus(root: pathlib.Path) -> dict[str, Case]:
    """How each file in `root/in` is opened; files that are not there are made. Only `root/out` may be written to."""
    inside, out, mark = root / "in", root / "out", root / ESCAPE / "ran"
    for folder in (inside, out, root / ESCAPE):
        folder.mkdir(exist_ok=True)
    cases: dict[str, Case] = {}

    def add(files: dict[str, Callable[[], bytes]], opened: Callable[[pathlib.Path], object]) -> None:
        for name, make in files.items():
            path = inside / name
            if not path.exists():
                path.write_bytes(make())
            cases[name] = lambda path=path: opened(path)

    add(ARCHIVES, lambda path: extract(path, [MEMBER], out))
    add(headers(mark), map_numpy_file)
    add(IDX, map_idx)
    add(pickles(mark), lambda path: _read_batch(path, {"label": b"labels"}))
    add({"csv-endless-cell": lambda: b"a\n" + b"1" * 200_000 + b"\n"}, read_csv)
    if importlib.util.find_spec("PIL") is None:  # the rest is images
        return cases
    add(PICTURES, decode)
    for name, text in PARTITIONS.items():
        folder = inside / name
        folder.mkdir(exist_ok=True)
        (folder / "list_eval_partition.txt").write_text(text)
        (folder / "list_attr_celeba.txt").write_text("1\nBald\n000001.jpg 1\n")
        cases[name] = lambda folder=folder: CelebADataset("train", data_dir=folder)
    linked = inside / "linked-pictures"
    if not linked.exists():
        (linked / "a").mkdir(parents=True)
        (linked / "a" / "x.png").symlink_to("/etc/passwd")
    cases["linked-pictures"] = lambda: ImageFolderSource(linked)
    return cases


def watch(root: pathlib.Path, found: list[str]) -> None:
    """Write down whatever runs code, opens a connection, or writes outside `root/out`."""
    out = str(root / "out")
    forbidden = {"pickle.find_class", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "exec"}
    forbidden |= {"import", "socket.connect", "ctypes.dlopen", "os.symlink", "os.link"}
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown"}

    def hook(event: str, arguments: tuple) -> None:
        if event in forbidden:
            found.append(f"{event} {str(arguments)[:80]}")
        elif (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            if not str(arguments[0]).startswith(out):
                found.append(f"open {arguments[0]}")
        elif event in changes and isinstance(arguments[0], str | os.PathLike):
            # shutil.rmtree names what it removes relative to an open folder, which it may only open in `out`.
            paths = [os.fspath(path) for path in arguments[:2] if isinstance(path, str | os.PathLike)]
            if not all(path.startswith(out) for path in paths if os.path.isabs(path)):
                found.append(f"{event} {paths}")

    sys.addaudithook(hook)


def open_all(root: pathlib.Path) -> None:
    """Open every file under watch, and print what came of it."""
    cases = corpus(root)
    # What Python and Pillow import when they are first used, before anybody watches.
    if importlib.util.find_spec("PIL") is not None:
        importlib.import_module("PIL.Image").init()
    for name in ("cp437", "utf-8-sig", "ascii", "latin1"):
        codecs.lookup(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    events: list[str] = []
    watch(root, events)
    results = {}
    for name, case in cases.items():
        seen, start = len(events), time.perf_counter()
        try:
            outcome = ["accepted", str(case())[:200]]
        except Exception as error:
            outcome = [type(error).__name__, str(error)]
        results[name] = [*outcome, round(time.perf_counter() - start, 3), events[seen:]]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps({"results": results, "megabytes": grown}))


if __name__ == "__main__":
    {"make": corpus, "open": open_all}[sys.argv[1]](pathlib.Path(sys.argv[2]))
