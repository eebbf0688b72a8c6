"""From text to blocks of tokens."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from silverspoon_kd.errors import DataError, MissingDependencyError

PYTHON_TOPICS = "python-topics"


def load_documents(source: str, column: str = "text") -> list[str]:
    """Return the documents of a source.

    Args:
        source: "python-topics", the reference topics of the standard library, a document each; or a file: ``.txt``
            (a document is what stands between blank lines), ``.jsonl`` or ``.parquet`` (a document a row).
        column: the column of a ``.jsonl`` or ``.parquet`` file.

    Raises:
        DataError: the source is unknown, cannot be read, or has no text.
    """
    if source == PYTHON_TOPICS:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    path = Path(source)
    readers: dict[str, Callable[[Path, str], list[str]]] = {
        ".txt": _read_text,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise DataError(
            f"data.source={source!r} is neither {PYTHON_TOPICS!r} nor a {', '.join(readers)} file. Give one of these."
        )
    if not path.is_file():
        raise DataError(f"data.source={source!r} does not exist or is no file. Paths count from the working folder.")
    documents = [text for text in readers[path.suffix](path, column) if text.strip()]
    if not documents:
        raise DataError(f"{source} holds no text.")
    return documents


def split_documents(documents: Sequence[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """Return the documents to train on and the held-out ones, about ``held_out`` of all characters.

    The same documents, share and seed give the same split.

    Raises:
        DataError: there is only one document.
    """
    if len(documents) < 2:
        raise DataError("The text is one document, so none can be held out. Separate documents by blank lines.")
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    limit = held_out * sum(map(len, documents))
    chosen, size = {order[0]}, len(documents[order[0]])
    for number in order[1:-1]:
        if size + len(documents[number]) <= limit:
            chosen.add(number)
            size += len(documents[number])
    train = [text for number, text in enumerate(documents) if number not in chosen]
    return train, [documents[number] for number in sorted(chosen)]


def token_blocks(documents: Sequence[str], tokenizer: Any, block_size: int) -> list[dict[str, list[int]]]:
    """Return examples of ``block_size`` tokens: the documents in a row, an end-of-text token after each.

    The rest that fills no block is dropped.

    Raises:
        DataError: the tokenizer has no end-of-text token, or the text fills no block.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"The tokenizer {type(tokenizer).__name__} has no end-of-text token to separate documents.")
    tokens: list[int] = []
    for document in documents:
        tokens += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        tokens.append(tokenizer.eos_token_id)
    if len(tokens) < block_size:
        raise DataError(
            f"{len(documents)} documents have {len(tokens)} tokens, too few for a block of {block_size}. Give more "
            "text, another share in data.held_out, or a smaller data.block_size."
        )
    starts = range(0, len(tokens) - block_size + 1, block_size)
    return [_example(tokens[start : start + block_size]) for start in starts]


def _example(tokens: list[int]) -> dict[str, list[int]]:
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": list(tokens)}


def _read_text(path: Path, column: str) -> list[str]:
    try:
        return re.split(r"\n\s*\n", path.read_text("utf-8").strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}.") from error


def _read_jsonl(path: Path, column: str) -> list[str]:
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is no JSON: {error}.") from error
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                found = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise DataError(f"{path}, line {number} has no text in {column!r}; it has {found}. Set data.column.")
            documents.append(row[column])
    return documents


def _read_parquet(path: Path, column: str) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError(f"{path} needs pyarrow. Install it with: pip install pyarrow.") from error
    try:
        table = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    names = table.schema_arrow.names
    if column not in names:
        raise DataError(f"{path} has no column {column!r}; it has {', '.join(names)}. Set data.column.")
    return [str(text) for text in table.read([column])[column].to_pylist() if text is not None]
