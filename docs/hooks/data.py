"""The benchmarks' CSV files lie outside docs/: the site carries copies, and links to them are redirected."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = "benchmark/data"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the CSV files."""
    for path in sorted((ROOT / DATA).glob("*.csv")):
        files.append(File.generated(config, f"{DATA}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Pages lie at the top of the site."""
    return markdown.replace(f"](../{DATA}/", f"]({DATA}/")
