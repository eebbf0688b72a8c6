import json

import pytest

from silverspoon_kd.cli.data import load_documents, split_documents, token_blocks
from silverspoon_kd.errors import DataError
from support.tiny_folder import model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(tmp_path_factory.mktemp("model"), layers=1))


def test_python_topics_are_the_topics_of_the_standard_library():
    from pydoc_data.topics import topics

    documents = load_documents("python-topics")
    assert len(documents) == len(topics)
    assert sorted(documents) == sorted(topics.values())


def test_text_is_split_at_blank_lines(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n\n  \nthree\n\n\n", "utf-8")
    assert load_documents(str(file)) == ["one\ntwo", "three"]


def test_jsonl_and_parquet_give_a_document_a_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "é one", "other": "x"}, {"text": "two", "other": "y"}, {"text": " ", "other": "z"}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8")
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for file in (lines, table):
        assert load_documents(str(file)) == ["é one", "two"]
        assert load_documents(str(file), "other") == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.csv", "x", "neither 'python-topics' nor a .txt, .jsonl, .parquet file"),
        ("missing.txt", None, "does not exist"),
        ("a.txt", " \n\n ", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "is no UTF-8 text"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is no JSON"),
        ("a.jsonl", '{"words": "a"}\n', "line 1 has no text in 'text'; it has ['words']. Set data.column"),
        ("a.jsonl", '{"text": 5}\n', "line 1 has no text in 'text'"),
        ("a.jsonl", "[1]\n", "it has list"),
        ("a.parquet", b"PAR1 not really", "a.parquet cannot be read"),
    ],
)
def test_bad_sources_are_refused(tmp_path, name, content, wanted):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        load_documents(str(tmp_path / name))
    assert wanted in str(caught.value)


def test_an_unknown_parquet_column_is_named_with_the_known_ones(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no column 'text'; it has words"):
        load_documents(str(tmp_path / "a.parquet"))


def test_the_split_is_by_document_of_the_wanted_size_and_always_the_same():
    documents = [f"{number} " * (10 + number) for number in range(100)]
    train, held_out = split_documents(documents, 0.2, seed=0)
    assert sorted(train + held_out) == sorted(documents)
    size = sum(map(len, documents))
    assert 0.17 * size < sum(map(len, held_out)) <= 0.2 * size
    assert split_documents(documents, 0.2, seed=0) == (train, held_out)
    assert split_documents(documents, 0.2, seed=1)[1] != held_out


def test_the_split_of_the_python_topics_holds_out_about_what_was_asked():
    documents = load_documents("python-topics")
    _, held_out = split_documents(documents, 0.1, seed=0)
    assert 0.08 <= sum(map(len, held_out)) / sum(map(len, documents)) <= 0.1


def test_there_is_always_something_on_both_sides():
    assert [len(side) for side in split_documents(["a" * 100, "b"], 0.01, seed=0)] == [1, 1]
    assert [len(side) for side in split_documents(["a", "b"], 0.99, seed=0)] == [1, 1]
    with pytest.raises(DataError, match="one document"):
        split_documents(["a"], 0.5, seed=0)


def test_blocks_hold_the_tokens_in_order_with_an_end_after_each_document(tokenizer):
    documents = ["w1 w2 w3", "w4 w5"]
    blocks = token_blocks(documents, tokenizer, block_size=3)
    end, ids = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids
    assert [block["input_ids"] for block in blocks] == [ids(["w1", "w2", "w3"]), [end, *ids(["w4", "w5"])]]
    assert all(block["labels"] == block["input_ids"] for block in blocks)
    assert all(block["attention_mask"] == [1, 1, 1] for block in blocks)


def test_too_little_text_for_a_block_is_refused(tokenizer):
    with pytest.raises(DataError, match="1 documents have 3 tokens, too few for a block of 4"):
        token_blocks(["w1 w2"], tokenizer, block_size=4)


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer):
    class Endless:
        eos_token_id = None

    with pytest.raises(DataError, match="no end-of-text token"):
        token_blocks(["a"], Endless(), block_size=4)
