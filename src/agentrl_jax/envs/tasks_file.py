"""Reads the user's own questions from a JSONL file: every fault is named with its line, before anything is compiled."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

MAX_PROMPT = 256
MAX_ANSWER = 64
MAX_EXPRESSION = 64
MAX_OPERATORS = 8
_DIGITS = 40

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class TasksError(ValueError):
    """A tasks file that cannot be used; the message names the file, the line and the reason."""


class Task(NamedTuple):
    """One row: UTF-8 texts without surrounding whitespace, ``expression`` empty when there is none; its line number."""

    prompt: bytes
    answer: bytes
    expression: bytes
    line: int


class Report(NamedTuple):
    """``rows`` read, blank lines aside; line numbers of the rows dropped as duplicates and as over-long."""

    rows: int
    duplicates: tuple[int, ...]
    too_long: tuple[int, ...]

    def __str__(self) -> str:
        """One line: how many rows were kept, and the lines of those dropped."""
        kept = self.rows - len(self.duplicates) - len(self.too_long)
        parts = [f"{kept} of {self.rows} rows kept"]
        for what, lines in (("duplicate", self.duplicates), ("over-long", self.too_long)):
            if lines:
                shown = ", ".join(map(str, lines[:10])) + (", ..." if len(lines) > 10 else "")
                parts.append(f"{len(lines)} {what} dropped (line {shown})")
        return "; ".join(parts)


class Tasks(NamedTuple):
    """A table of tasks; ``path`` as given, ``report`` of what was dropped."""

    path: str
    rows: tuple[Task, ...]
    report: Report


def load_tasks(
    path: str | Path,
    *,
    max_prompt: int = MAX_PROMPT,
    max_answer: int = MAX_ANSWER,
    max_expression: int = MAX_EXPRESSION,
) -> Tasks:
    """Reads ``{"prompt": ..., "answer": ...}`` rows, one JSON object a line, in UTF-8 (a byte order mark is skipped).

    A number is accepted as an answer and written in full; ``"expression"`` is optional: integers and ``+ - * // % ( )``
    with the answer as value. Other keys are ignored, and so are blank lines. Rows with more bytes than the limits, and
    repetitions of a row, are dropped and reported.

    Raises:
      TasksError: the file cannot be read or holds no usable row; a row is not UTF-8, not a JSON object, repeats a key,
        lacks one, has one of the wrong type, empty, with a NUL or half a surrogate pair, or with a line break in the
        answer; an expression is malformed or has another value than the answer; a prompt comes with two answers.
    """
    path, limits = str(path), (max_prompt, max_answer, max_expression)
    rows: dict[bytes, Task] = {}
    duplicates, too_long, read = [], [], 0
    for line, raw in _lines(path):
        read += 1
        task = _parse(path, line, raw)
        if any(len(text) > limit for text, limit in zip(task[:3], limits, strict=True)):
            too_long.append(line)
        elif task.prompt in rows:
            _same_answer(path, rows[task.prompt], task)
            duplicates.append(line)
        else:
            rows[task.prompt] = task
    report = Report(read, tuple(duplicates), tuple(too_long))
    if not rows:
        raise TasksError(f"{path}: no usable rows ({report}); limits in bytes: prompt, answer, expression {limits}")
    return Tasks(path, tuple(rows.values()), report)


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise TasksError(f"{path}: cannot be read: {error.strerror or error}") from error
    for line, text in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if text.strip():
            yield line, text


def _same_answer(path: str, first: Task, second: Task) -> None:
    if first.answer != second.answer:
        answers = f"{first.answer.decode()!r} in line {first.line}, {second.answer.decode()!r} in line {second.line}"
        raise TasksError(f"{path}: the prompt {first.prompt.decode()!r} has two answers: {answers}")


def _parse(path: str, line: int, raw: bytes) -> Task:
    def fail(reason: str) -> TasksError:
        return TasksError(f"{path}: line {line}: {reason}")

    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_float=Decimal, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise fail(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise fail(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise fail(f"a row is a JSON object with 'prompt' and 'answer', got {type(row).__name__}")
    missing = [name for name in ("prompt", "answer") if name not in row]
    if missing:
        raise fail(f"missing key {missing[0]!r}; it has {sorted(row)}")
    try:
        answer = _text("answer", _number(row["answer"]))
        expression = _text("expression", row["expression"]) if row.get("expression") is not None else b""
        task = Task(_text("prompt", row["prompt"]), answer, expression, line)
        _check_expression(task)
    except ValueError as error:
        raise fail(str(error)) from error
    return task


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"a key is repeated: {[name for name, _ in pairs]}")
    return row


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")


def _number(value: Any) -> Any:
    """A JSON number in full digits; anything else as it is."""
    if isinstance(value, Decimal):
        if abs(value.adjusted()) > _DIGITS:
            raise ValueError(f"'answer' {value} has an exponent beyond {_DIGITS}")
        return format(value, "f")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        allowed = "a string or a number" if name == "answer" else "a string"
        raise ValueError(f"{name!r} must be {allowed}, got {type(value).__name__} {str(value)[:40]}")
    value = value.strip()
    if not value:
        raise ValueError(f"{name!r} is empty")
    if "\0" in value:
        raise ValueError(f"{name!r} contains a NUL character")
    if name != "prompt" and any(c in value for c in "\n\r"):
        raise ValueError(f"{name!r} must be one line")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name!r} contains half a surrogate pair at character {error.start + 1}") from error


def _check_expression(task: Task) -> None:
    if not task.expression or len(task.expression) > MAX_EXPRESSION:
        return
    text = task.expression.decode()
    try:
        if set(text) - set("0123456789+-*/% ()"):
            raise ValueError("only digits and + - * // % ( ) are allowed")
        value, operators = _evaluate(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"'expression' {text!r} is malformed: {error}") from error
    if operators > MAX_OPERATORS:
        raise ValueError(f"'expression' {text!r} has {operators} operators, at most {MAX_OPERATORS} are allowed")
    try:
        agrees = Decimal(task.answer.decode()) == value
    except ArithmeticError:
        agrees = False
    if not agrees:
        raise ValueError(f"'expression' {text!r} gives {value}, but 'answer' is {task.answer.decode()!r}")


def _evaluate(node: ast.AST) -> tuple[int, int]:
    """``(value, operators)`` of a parsed expression, by walking it: nothing of the file is executed."""
    match node:
        case ast.Constant(value=int(value)):
            return value, 0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            value, count = _evaluate(operand)
            return (-value if isinstance(op, ast.USub) else value), count + 1
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            (a, m), (b, n) = _evaluate(left), _evaluate(right)
            return _OPERATORS[type(op)](a, b), m + n + 1
    raise ValueError(f"{type(node).__name__} is not allowed")
