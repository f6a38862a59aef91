"""What makes a checkpoint complete: a manifest, written last, with the size and the hash of every file."""

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Flush every file below a folder to the disk and list them; a reader trusts nothing that is not listed."""
    files = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        _flush(path)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"version": 1, "files": files}, indent=1), encoding="utf-8")
    _flush(manifest)
    for entry in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        flush_folder(entry)


def damage(folder: Path) -> str | None:
    """Tell what is wrong with a checkpoint, or None if it is complete."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if _digest(path) != expected["sha256"]:
            return f"{name} has changed since it was written"
    return None


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
