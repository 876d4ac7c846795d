"""Imported before torch, in every process of a benchmark: NVLink multicast stays off, and waits end soon."""

import os

for name, value in (
    ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1"),
    ("PK_TIMEOUT_S", "10"), ("PK_ENTRY_TIMEOUT_S", "60"),
):  # fmt: skip
    os.environ.setdefault(name, value)
