"""An episode as text to read: what the environment said, what the agent wrote, what it earned.

Both come from outside and are not trusted: every character that is not printable is escaped, so no episode can move
a terminal's cursor, hide text by its direction, or leave its place in a page.
"""

from __future__ import annotations

import codecs
import functools
import html
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from agentrl_jax.codecs.base import Codec
from agentrl_jax.types import Trajectory

_STYLES = ("text", "ansi", "html")
_HIDDEN = ("reward", "anchor", "played", "cut")  # Shown otherwise, or of no use to a reader.
_DIM, _CYAN, _GREEN, _RED, _BOLD, _OFF = "\x1b[2m", "\x1b[36m", "\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[0m"


class Run(NamedTuple):
    """Neighbouring tokens of one turn from one writer.

    Attributes:
      turn: index within the episode.
      writer: ``"observation"``, ``"action"`` or ``"expert"``.
      pieces: escaped text and advantage of every token, NaN where there is none.
      reward: earned on these tokens.
      ended: whether the end-of-action id is among them.
    """

    turn: int
    writer: str
    pieces: list[tuple[str, float]]
    reward: float
    ended: bool

    @property
    def adv(self) -> float:
        """Mean advantage of its tokens, NaN without any."""
        values = [value for _, value in self.pieces if np.isfinite(value)]
        return float(np.mean(values)) if values else float("nan")

    @property
    def text(self) -> str:
        """All of its text, escaped."""
        return "".join(piece for piece, _ in self.pieces)


def render(traj: Trajectory, row: int, codec: Codec, adv: Any = None, style: str = "text") -> str:
    """One row as readable text.

    Args:
      traj: arrays ``[B, T]``, NumPy or on a device.
      row: which one.
      codec: the one it was sampled with.
      adv: ``[B, T]`` or ``[B]``, advantage of every token or row; None leaves it out.
      style: ``"text"``; ``"ansi"`` for a terminal; ``"html"`` for a notebook: observations grey, actions on green or
        red as strong as their advantage is positive or negative within the row, the expert's underlined.

    Raises:
      ValueError: an unknown style, or shapes that do not fit.
      IndexError: there is no such row.
    """
    if style not in _STYLES:
        raise ValueError(f"style is {style!r}; allowed are {', '.join(_STYLES)}")
    rows, columns = np.shape(traj.tokens)
    if not 0 <= row < rows:
        raise IndexError(f"row {row} of {rows}")
    one = jax.tree.map(lambda leaf: np.asarray(leaf[row]), traj._replace(record=None, support=None))
    found = list(runs(one, codec, _advantages(adv, row, rows, columns)))
    head = _head(one, row)
    if style == "html":
        return _html(head, found, one)
    paint = _ansi if style == "ansi" else _plain
    return "\n".join([paint("head", head, 0.0), *_lines(found, one, paint)]) + "\n"


def runs(one: Trajectory, codec: Codec, adv: np.ndarray) -> Iterator[Run]:
    """The runs of one row (a trajectory without its batch axis), control ids left out; ``adv [T]``."""
    length = int(one.length)
    written, expert = one.mask.tolist(), one.expert.tolist()
    texts = _token_bytes(np.asarray(one.tokens), length, codec)

    def label(t: int) -> tuple[int, str]:
        return int(one.turn[t]), ("expert" if expert[t] else "action") if written[t] else "observation"

    for (turn, writer), group in groupby(range(length), label):
        at = list(group)
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        # A character cut in two by a token boundary belongs to the token that completes it.
        texts_at = [decoder.decode(texts[t], final=t == at[-1]) for t in at]
        pieces = [
            (escape(text), float(adv[t]) if written[t] else float("nan")) for t, text in zip(at, texts_at, strict=True)
        ]
        ended = bool(np.any(one.tokens[at] == codec.end_action))
        yield Run(turn, writer, pieces, float(one.reward[at].sum()), ended)


def escape(text: str) -> str:
    r"""Characters that are not printable as ``\xNN``, ``\uNNNN`` or ``\UNNNNNNNN``; a newline stays."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _advantages(adv: Any, row: int, rows: int, columns: int) -> np.ndarray:
    if adv is None:
        return np.full(columns, np.nan)
    adv = np.asarray(adv, np.float64)
    if adv.shape not in ((rows,), (rows, columns)):
        raise ValueError(f"adv has shape {adv.shape}; expected {(rows,)} or {(rows, columns)}")
    return np.broadcast_to(adv[row], (columns,))


@functools.cache
def _decoder(decode: Callable[..., Any], capacity: int) -> Callable[..., Any]:
    return jax.jit(jax.vmap(lambda token: decode(token[None], np.int32(1), capacity)))


def _token_bytes(tokens: np.ndarray, length: int, codec: Codec, capacity: int = 64) -> list[bytes]:
    """The bytes of each token; the capacity grows until every one fits."""
    text = jax.device_get(_decoder(codec.decode, capacity)(tokens))
    if np.any(text.length[:length] >= capacity):
        return _token_bytes(tokens, length, codec, capacity * 4)
    return [text.data[t, : text.length[t]].tobytes() for t in range(length)]


def _head(one: Trajectory, row: int) -> str:
    if one.length == 0:
        return f"row {row}: not played"
    ending = "terminated" if one.terminated else "truncated" if one.truncated else "goes on in another row"
    where = f"row {row}, episode {one.episode}, task {one.task}, group {one.group}"
    return f"{where}: {one.length} tokens, reward {one.reward.sum():+.3f}, {ending}"


def _caption(run: Run) -> str:
    tokens = f"{len(run.pieces)} token{'s' if len(run.pieces) != 1 else ''}"
    cut = "" if run.writer == "observation" or run.ended else ", cut"
    return f"{run.writer} ({tokens}{cut})"


def _earned(run: Run, one: Trajectory) -> str:
    """Reward, advantage and what the environment reported of the turn, after an action."""
    parts = [f"reward {run.reward:+.3f}"]
    if np.isfinite(run.adv):
        parts.append(f"advantage {run.adv:+.3f}")
    for name, values in sorted(one.steps.items()):
        if name not in _HIDDEN and values.ndim == 1 and 0 <= run.turn < len(values) and values[run.turn] != 0:
            parts.append(f"{escape(name)} {values[run.turn]:g}")
    return ", ".join(parts)


def _lines(found: list[Run], one: Trajectory, paint: Callable[[str, str, float], str]) -> Iterator[str]:
    for turn, group in groupby(found, lambda run: run.turn):
        yield paint("head", f"turn {turn}", 0.0)
        for run in group:
            yield paint("note", f"  {_caption(run)}", 0.0)
            # The bar before every line keeps text that imitates a caption apart from one.
            yield from (f"    | {paint(run.writer, line, run.adv)}" for line in run.text.split("\n"))
            if run.writer != "observation" or run.reward:
                yield paint("note", f"  {_earned(run, one)}", 0.0)


def _plain(kind: str, text: str, adv: float) -> str:
    del kind, adv
    return text


def _ansi(kind: str, text: str, adv: float) -> str:
    colour = {"head": _BOLD, "note": _DIM, "observation": _CYAN}.get(kind)
    if colour is None:
        colour = _GREEN if adv > 0 else _RED if adv < 0 else _BOLD
    return f"{colour}{text}{_OFF}" if text else ""


def _html(head: str, found: list[Run], one: Trajectory) -> str:
    largest = max((abs(adv) for run in found for _, adv in run.pieces if np.isfinite(adv)), default=0.0)
    parts = [f'<div style="{_FRAME}"><b>{html.escape(head)}</b>']
    for turn, group in groupby(found, lambda run: run.turn):
        parts.append(f'<div style="margin-top:6px"><b>turn {turn}</b></div>')
        for run in group:
            parts.append(f'<div style="{_NOTE}">{html.escape(_caption(run))}</div>')
            parts.append(f'<div style="{_BODY}">{_spans(run, largest)}</div>')
            if run.writer != "observation" or run.reward:
                parts.append(f'<div style="{_NOTE}">{html.escape(_earned(run, one))}</div>')
    return "\n".join([*parts, "</div>"])


_FRAME = "font-family:monospace;font-size:13px;line-height:1.45;max-width:60em"
_NOTE = "opacity:.6;font-size:11px;margin-left:1em"
_BODY = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin-left:1em;padding-left:.6em;"
    "border-left:3px solid rgba(128,128,128,.4)"
)


def _spans(run: Run, largest: float) -> str:
    """Tokens in one span as long as they look the same."""
    parts = []
    for css, group in groupby(run.pieces, lambda piece: _css(run.writer, piece[1], largest)):
        parts.append(f'<span style="{css}">{html.escape("".join(text for text, _ in group))}</span>')
    return "".join(parts)


def _css(writer: str, adv: float, largest: float) -> str:
    if writer == "observation":
        return "color:rgba(128,128,128,1)"
    line = ";text-decoration:underline dotted" if writer == "expert" else ""
    if not np.isfinite(adv) or largest == 0:
        return f"background:rgba(64,128,255,.18){line}"
    colour = "0,160,70" if adv >= 0 else "220,50,47"
    return f"background:rgba({colour},{0.08 + 0.42 * abs(adv) / largest:.2f}){line}"
