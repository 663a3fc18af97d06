"""Files that are compressed: their bytes are no text, and are not learned as one."""

from __future__ import annotations

from pathlib import Path

ENDINGS = (".gz", ".tgz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".zip", ".7z", ".br", ".z")
# How content begins: no text does so.
BEGINS = {
    b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7z",
}  # fmt: skip


def compressed_by(content: bytes) -> str:
    """Return the program that compressed a file, of which `content` is the begin or all; "" for none that is known."""
    if content.startswith(b"BZh") and content[4:10] == b"1AY&SY":
        return "bzip2"
    return next((name for begin, name in BEGINS.items() if content.startswith(begin)), "")


def is_compressed(path: Path) -> bool:
    """Whether a file is a compressed one of a kind that is read where it is not."""
    return path.suffix.lower() in ENDINGS
