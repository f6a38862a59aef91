"""What a confined process may use."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on one process. It cannot start others, so they are limits on the whole program.

    Attributes:
        max_memory_bytes: Address space.
        max_output_bytes: Of standard output and standard error together, after which the process is ended.
        max_disk_bytes: All files in its folder together, after which the process is ended; also the size of each.
        max_threads: At the same time.
        max_open_files: At the same time.
    """

    max_memory_bytes: int = 1 << 30
    max_output_bytes: int = 1 << 20
    max_disk_bytes: int = 16 << 20
    max_threads: int = 32
    max_open_files: int = 64
