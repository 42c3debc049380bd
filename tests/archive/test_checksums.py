"""Which files of a directory its checksums cover."""

from loadgen.archive import checksums


def test_hidden_and_temporary_files_links_and_nested_directories_with_checksums_are_left_out(
    tmp_path,
):
    for name in ("b.json", "logs/a.log", ".hidden", ".cache/c", "d.partial", "e.part",
                 "runs/1/requests.parquet", "runs/1/logs/x", "runs/2/y"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "b.json")
    checksums.begin(tmp_path / "runs" / "1", ["requests.parquet"])
    covered = ["b.json", "logs/a.log", "runs/2/y"]
    assert sorted(checksums.files_in(tmp_path)) == covered
    checksums.begin(tmp_path, [])
    checksums.cover_rest(tmp_path)
    assert sorted(checksums.read(tmp_path) or {}) == covered
    (tmp_path / "runs" / "1" / "requests.parquet").write_text("written again by report")
    assert checksums.problems(tmp_path) == []
