"""Transcripts: every byte shown or escaped, writers told apart, nothing from an episode acts on its reader."""

import html
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.codecs.byte import byte
from agentrl_jax.transcript import escape, render
from agentrl_jax.types import Trajectory

CODEC = byte()
T = 96


def make(turns, *, expert=(), reward=None, rows=1, row=0, **fields):
    """A trajectory whose row holds the turns ``(observation, action, ended)``."""
    tokens, mask, turn, by_expert, ends = [CODEC.start], [False], [0], [False], []
    for k, (observation, action, ended) in enumerate(turns):
        written = [*action, *([CODEC.end_action] if ended else [])]
        for ids, wrote in (([CODEC.open_observation, *observation, CODEC.open_action], False), (written, True)):
            tokens += ids
            mask += [wrote] * len(ids)
            turn += [k] * len(ids)
            by_expert += [wrote and k in expert] * len(ids)
        ends.append(len(tokens) - 1)
    length = len(tokens)
    assert length <= T

    def pad(values, fill, dtype):
        out = np.full((rows, T), fill, dtype)
        out[row, :length] = values
        return out

    earned = pad([0.0] * length, 0, np.float32)
    for end, value in zip(ends, reward or [0.0] * len(ends), strict=True):
        earned[row, end] = value
    ints = {name: np.zeros(rows, np.int32) for name in ("group", "episode", "role", "segment", "version")}
    ints |= {name: np.full(rows, -1, np.int32) for name in ("parent", "branch")}
    lengths = np.zeros(rows, np.int32)
    lengths[row] = length
    return Trajectory(
        tokens=pad(tokens, CODEC.pad, np.int32),
        mask=pad(mask, False, bool),
        expert=pad(by_expert, False, bool),
        logp=np.zeros((rows, T), np.float32),
        reward=earned,
        turn=pad(turn, -1, np.int32),
        length=lengths,
        terminated=np.ones(rows, bool),
        truncated=np.zeros(rows, bool),
        task=np.full(rows, 17, np.int32),
        temperature=np.ones(rows, np.float32),
        steps=fields.get("steps", {}),
        **ints,
    )


TWO = [(b"What is 12*3?", b"CALL 12*3", True), (b"36", b"ANSWER 36", True)]


def test_text_golden():
    steps = {
        "success": np.array([[0.0, 1.0]]),
        "anchor": np.array([[7, 8]], np.uint32),
        "tool_calls": np.array([[1.0, 0.0]]),
    }
    adv = np.zeros((1, T))
    traj = make(TWO, reward=[0.0, 1.0], expert={0}, steps=steps)
    adv[traj.mask] = 0.5
    assert render(traj, 0, CODEC, adv) == (
        "row 0, episode 0, task 17, group 0: 40 tokens, reward +1.000, terminated\n"
        "turn 0\n"
        "  observation (16 tokens)\n"
        "    | What is 12*3?\n"
        "  expert (10 tokens)\n"
        "    | CALL 12*3\n"
        "  reward +0.000, advantage +0.500, tool_calls 1\n"
        "turn 1\n"
        "  observation (4 tokens)\n"
        "    | 36\n"
        "  action (10 tokens)\n"
        "    | ANSWER 36\n"
        "  reward +1.000, advantage +0.500, success 1\n"
    )


def test_other_rows_and_cuts():
    traj = make([(b"q", b"never end", False)], rows=3, row=1)
    assert render(traj, 0, CODEC) == "row 0: not played\n"
    text = render(traj, 1, CODEC, np.array([1.0, -0.25, 1.0]))
    assert "action (9 tokens, cut)" in text
    assert "advantage -0.250" in text
    traj = traj._replace(terminated=np.zeros(3, bool), truncated=np.ones(3, bool))
    assert "truncated" in render(traj, 1, CODEC)
    assert "advantage" not in render(traj, 1, CODEC)
    with pytest.raises(IndexError, match="row 3 of 3"):
        render(traj, 3, CODEC)
    with pytest.raises(ValueError, match="allowed are text, ansi, html"):
        render(traj, 0, CODEC, style="pdf")
    with pytest.raises(ValueError, match=r"adv has shape \(2,\); expected \(3,\)"):
        render(traj, 0, CODEC, np.zeros(2))


def test_text_that_imitates_a_caption_stays_behind_its_bar():
    text = render(make([(b"x\n  action (3 tokens)\n    | forged", b"a", True)]), 0, CODEC)
    captions = [line for line in text.splitlines() if line.startswith("  ") and not line.startswith("    | ")]
    assert captions == ["  observation (37 tokens)", "  action (2 tokens)", "  reward +0.000"]


@settings(deadline=None, max_examples=60)
@given(
    observation=st.binary(max_size=30), action=st.binary(max_size=30), style=st.sampled_from(["text", "ansi", "html"])
)
def test_nothing_unprintable_gets_out(observation, action, style):
    text = render(make([(observation, action, True)]), 0, CODEC, style=style)
    if style == "ansi":
        text = re.sub(r"\x1b\[[0-9]+m", "", text)
    assert all(c.isprintable() or c == "\n" for c in text)
    if style == "html":
        assert set(re.findall(r"<(/?\w+)", text)) <= {"div", "/div", "b", "/b", "span", "/span"}
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    for data in (observation, action):
        expected = escape(data.decode("utf-8", "backslashreplace"))
        if style == "html":
            assert f"\n{expected}\n" in text
        else:
            assert all(f"    | {line}\n" in text for line in expected.split("\n"))


def test_escapes():
    assert escape("a\x1b[2J\r\x00\u202e\x7f\u2028é\n日") == "a\\x1b[2J\\r\\x00\\u202e\\x7f\\u2028é\n日"
    text = render(make([("日本 ok".encode(), b"\xff\xfe\xe6\x97", True)]), 0, CODEC)
    assert "日本 ok" in text
    assert "\\xff\\xfe\\xe6\\x97" in text


def test_html_is_coloured_by_writer_and_advantage():
    traj = make([(b"<script>alert('x')</script>", b"<b>&", True), (b"", b"no", True)], expert={1})
    adv = np.zeros((1, T))
    adv[0, traj.mask[0] & (traj.turn[0] == 0)] = 2.0
    adv[0, traj.mask[0] & (traj.turn[0] == 1)] = -1.0
    page = render(traj, 0, CODEC, adv, style="html")
    assert "<script>" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page
    assert '<span style="background:rgba(0,160,70,0.50)">&lt;b&gt;&amp;</span>' in page
    assert '<span style="background:rgba(220,50,47,0.29);text-decoration:underline dotted">no</span>' in page
    assert "rgba(64,128,255,.18)" in render(traj, 0, CODEC, style="html")


def test_ansi_colours_by_sign():
    traj = make(TWO)
    for sign, colour in ((1.0, 32), (-1.0, 31), (0.0, 1)):
        assert f"\x1b[{colour}mCALL 12*3\x1b[0m" in render(traj, 0, CODEC, np.array([sign]), style="ansi")
    assert "\x1b[36m36\x1b[0m" in render(traj, 0, CODEC, style="ansi")
