"""Eight virtual devices, and programs that compile fast."""

import os

import fast

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast.flags(devices=8)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
