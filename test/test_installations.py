"""Environments in which what is broken lies over the packages of this one; `python test/installations.py` makes all others."""

import csv
import importlib.metadata
import json
from dataclasses import replace

import installations
import pytest

HERE = {name.lower() for distribution in importlib.metadata.distributions() if (name := distribution.metadata["Name"])}

needs_both = pytest.mark.skipif(
    not {"triton", "nvidia-cutlass-dsl"} <= HERE, reason="needs triton and cutlass installed, to break them"
)


@needs_both
@pytest.mark.parametrize("name", ["raise SystemExit", "mixed versions", "blocked"])
def test_E3_broken_packages_in_an_environment_of_their_own(name, tmp_path):
    (row,) = installations.over_this(tmp_path, name)
    assert row["verdict"] == "good", row


@needs_both
def test_an_environment_that_says_something_else_is_not_good(tmp_path, monkeypatch):
    (blocked,) = (environment for environment in installations.BROKEN if "blocked" in environment.name)
    monkeypatch.setattr(installations, "BROKEN", (replace(blocked, triton="", cutedsl="another reason"),))
    (row,) = installations.over_this(tmp_path)
    for complaint in ("triton should say 'nothing'", "interpreter should say 'nothing'", "cutedsl should say 'another reason'"):
        assert complaint in row["verdict"]


def test_a_large_download_is_refused_and_a_file_that_is_here_is_none(tmp_path, monkeypatch):
    (tmp_path / "a file.whl").write_bytes(b"0" * 10)

    def report(url):
        return json.dumps({"install": [{"download_info": {"url": url}, "metadata": {"name": "torch"}}]})

    installations.Maker.allow(report((tmp_path / "a file.whl").as_uri()), 0)
    monkeypatch.setattr(installations, "download_bytes", lambda url: 401_000_000)
    installations.Maker.allow(report("https://example.org/torch.whl"), 401)
    with pytest.raises(installations.NotRun, match=r"wheel of 401 MB \(torch\)"):
        installations.Maker.allow(report("https://example.org/torch.whl"), 400)


def test_lines_made_anew_replace_the_old_ones(tmp_path):
    def line(torch, verdict):
        return installations.line("torch alone", "3.11.7", torch, {"verdict": verdict})

    path = tmp_path / "lines.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, installations.COLUMNS)
        writer.writeheader()
        writer.writerows([line("2.14.1", "not run"), line("2.9.1", "good")])
    merged = installations.merged(path, [line("2.14.1+cu130", "good")])
    assert [(row["torch"], row["verdict"]) for row in merged] == [("2.9.1", "good"), ("2.14.1+cu130", "good")]
