"""`shardwise report` from the outside."""

import json
from pathlib import Path

from tests.cli.asking import Asker
from tests.report.runs import make_run, row, trained


def test_a_report_is_printed_and_written_into_the_run_folder(ask: Asker, tmp_path: Path) -> None:
    seen = ask("report", trained(tmp_path / "run"))
    assert seen.code == 0
    assert "optimizer" in seen.out
    assert seen.out.splitlines()[-1] == f"page: {tmp_path / 'run' / 'report.html'}"
    assert "<title>run: tiny</title>" in (tmp_path / "run" / "report.html").read_text()


def test_the_page_goes_where_it_is_asked_to(ask: Asker, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [row(2, 5.0)])
    assert ask("report", run, "--html", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").is_file()
    assert not (run / "report.html").exists()
    refused = ask("report", run, "--html", tmp_path / "nowhere" / "page.html")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "cannot be written" in refused.err


def test_json_is_for_programs(ask: Asker, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    found = json.loads(ask("report", run, "--json").out)
    assert found["loss"]["last"] == 2.0
    assert {each["class"] for each in found["memory"]} >= {"params", "grads", "optimizer", "activations", "peak"}
    assert not (run / "report.html").exists()


def test_what_is_no_run_is_one_sentence(ask: Asker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        refused = ask("report", path)
        assert refused.code == 2
        assert len(refused.err.splitlines()) == 1
        assert refused.out == ""
