"""The tables of fixed answers are complete: every row can be read, and every key has one answer."""

import pytest

from shardwise.migrate.tables import OFF, rules, table

ROWS = {
    (library, block): rows
    for library in ("deepspeed", "accelerate", "hugging_face")
    for block, rows in table(library).items()
    if isinstance(rows, list) and isinstance(rows[0], dict) and block != "switches"
}


@pytest.mark.parametrize(("library", "block"), ROWS)
def test_every_row_is_a_rule(library: str, block: str) -> None:
    rows = ROWS[library, block]
    for row in rows:
        assert set(row) <= {"ignored", "used", "refused", "keys", "unless"}
        reasons = [row[fate] for fate in ("ignored", "used", "refused") if fate in row]
        assert reasons
        assert all(map(str.strip, reasons))
        assert row["keys"]
        assert "unless" not in row or "refused" in row
    found = rules(library, block)
    assert len(found) == sum(len(row["keys"]) for row in rows), "a key has two rows"


def test_no_key_has_two_answers() -> None:
    switches = [key for row in table("deepspeed")["switches"] for key in row["keys"]]
    assert len(set(switches)) == len(switches)
    assert not set(switches) & set(rules("deepspeed", "top"))
    assert not set(rules("hugging_face", "trainer")) & set(rules("hugging_face", "programs"))
    names = [key for keys in table("hugging_face")["settings"].values() for key in keys]
    assert len(set(names)) == len(names)
    assert not set(names) & {*rules("hugging_face", "trainer"), *rules("hugging_face", "programs")}


def test_values_that_ask_for_nothing() -> None:
    found = rules("hugging_face", "programs")
    assert found["quantize_moe_experts"].unless == OFF
    assert found["model_revision"].unless == (*OFF, "main")
    assert found["tokenizer_legacy"].unless == ()
    assert not found["streaming"].refused
    assert rules("accelerate", "parallelism_config")["tp_size"].unless == ("1", "0")
