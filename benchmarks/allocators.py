"""Ways to run glibc's malloc, by its environment variables (mallopt(3)).

By default its thresholds follow what the program frees, so that the memory of activations goes back
to the system and comes again page by page in every step, or not, by chance of one process's
history. Both other ways are fixed. A `Trainer` that is open keeps freed memory by itself and
overrides these variables.
"""

from __future__ import annotations

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "keeps": {  # blocks up to 32 MiB come from the heap, and the heap never shrinks
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "MALLOC_TRIM_THRESHOLD_": str(2**36),
    },
    "gives_back": {"MALLOC_MMAP_THRESHOLD_": str(2**16)},  # a freed block of 64 KiB is gone at once
}
