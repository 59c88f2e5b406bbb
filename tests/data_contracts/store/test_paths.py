"""Confinement: no text from outside leads out of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.errors import ArtifactError
from data_contracts.store.paths import confined, files_in, relative


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "a//b",
        "a/",
        "C:\\x",
        "a\\b",
        "a\0b",
        "~/x",
        ".hidden",
        "a/./b",
        "x\n",
    ],
)
def test_a_path_that_could_leave_its_folder_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError):
        relative(text)


@given(st.text(max_size=40))
def test_what_is_accepted_always_lies_inside(text: str) -> None:
    folder = Path("/somewhere/payload")
    try:
        path = folder / relative(text)
    except ArtifactError:
        return
    assert path.is_relative_to(folder)
    assert ".." not in path.parts
    assert path != folder


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    payload = tmp_path / "payload"
    payload.mkdir()
    (payload / "inner").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="leads out"):
        confined(payload, "inner/secret")
    with pytest.raises(ArtifactError, match="link"):
        list(files_in(payload))


def test_files_come_sorted_with_slashes(tmp_path: Path) -> None:
    for name in ("b/x.json", "a.json", "b/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    assert [name for name, _ in files_in(tmp_path)] == ["a.json", "b/a.json", "b/x.json"]
