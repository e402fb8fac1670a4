"""Eight virtual devices, and an XLA that compiles quickly and carelessly: the tests' programs are tiny, compiling them
is nearly all they cost. Both sides of a comparison are compiled alike, in processes that a test starts too."""

import os

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
