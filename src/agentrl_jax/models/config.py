"""What fixes a transformer's structure: sizes, never numbers that are swept."""

from __future__ import annotations

import dataclasses

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder; hashable, and checked when it is built. A size left at 0 is filled in.

    Attributes:
      vocab_size: ids are in ``[0, vocab_size)``.
      layers: blocks of attention and feed-forward.
      width: of the residual stream, ``D``.
      heads: query heads, ``H``.
      kv_heads: key and value heads, a divisor of ``heads``; 0: ``heads``. Query head ``h`` reads kv head
        ``h // (heads // kv_heads)`` (Ainslie et al., 2023, arXiv:2305.13245).
      head_dim: even; 0: ``width // heads``.
      mlp_width: inner width of the SwiGLU feed-forward; 0: ``4 * width``.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      tied: one matrix serves as embedding and output head.
      value_head: adds a scalar head that starts at 0.
      dtype: of activations and cache.
      param_dtype: of parameters.
      cache_widths: ascending static widths at which attention reads the cache; None: quarters of the capacity.

    Raises:
      ValueError: a size does not fit; the message names the value and what is allowed.
    """

    vocab_size: int
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    value_head: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    cache_widths: tuple[int, ...] | None = None

    def __post_init__(self):
        """Fills in the fields left at 0, then checks all of them."""
        for name in ("vocab_size", "layers", "width", "heads"):
            _check_positive(name, getattr(self, name))
        if not self.head_dim and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}: change one, or give head_dim"
            )
        defaults = {"kv_heads": self.heads, "head_dim": self.width // self.heads, "mlp_width": 4 * self.width}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
            _check_positive(name, getattr(self, name))
        self._check()

    def _check(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
        widths = self.cache_widths
        if widths is not None and (not widths or widths[0] < 1 or list(widths) != sorted(set(widths))):
            raise ValueError(f"cache_widths={widths} must be ascending positive numbers, or None")


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
