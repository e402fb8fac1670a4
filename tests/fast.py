"""An XLA that compiles quickly and carelessly: the programs of the tests are tiny, and compiling is nearly all they
cost. Every process of the tests uses it, so both sides of a comparison are compiled alike."""

from importlib.metadata import version

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# It halves the time once more. A flag that XLA does not know ends the process: only where this one is known to exist.
if version("jaxlib").startswith("0.10."):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def flags(devices: int = 1) -> str:
    """``XLA_FLAGS`` of a process with so many virtual devices."""
    return f"{XLA_FLAGS} --xla_force_host_platform_device_count={devices}"
