"""`make docs`: the pages build without a warning, and a link that leads nowhere is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed (longshore[docs])")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500)


def test_every_page_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tensor_parallel_size" in (tmp_path / "api/load/index.html").read_text()
    assert "limit of shared memory per node" in (tmp_path / "api/config/index.html").read_text()
    assert "longshore verify" in (tmp_path / "api/command_line/index.html").read_text()


@pytest.mark.parametrize(
    ("link", "wrong"),
    [("../code.py", ""), ("../gone.py", "gone.py"), ("gone.md", "gone.md"), ("#gone", "#gone")],
)
def test_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str, wrong: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n[there]({link})\n\n```text\n[there](../in_a_block.py)\n```\n")
    (tmp_path / "code.py").write_text("here\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nhooks: [{ROOT}/docs/site_hooks/links.py]\nplugins: []\n"
        "validation: {links: {not_found: warn, anchors: warn}}\n"
    )
    done = build(tmp_path, tmp_path / "site")
    assert (done.returncode != 0) == bool(wrong), done.stderr
    assert wrong in done.stderr
    if not wrong:
        assert (tmp_path / "site/repository/code.py.txt").read_text() == "here\n"
        assert 'href="repository/code.py.txt"' in (tmp_path / "site/index.html").read_text()
