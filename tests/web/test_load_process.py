"""The load process next to a worker: its files after the end of the worker."""

from loadgen.web.load_process import remove_if_empty


def test_a_folder_with_rows_stays(tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "shard-0.npz").touch()
    remove_if_empty(tmp_path / "share")
    assert (tmp_path / "share" / "shard-0.npz").exists()


def test_a_folder_without_rows_is_removed(tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "log").write_text("a line\n")
    remove_if_empty(tmp_path / "share")
    assert not (tmp_path / "share").exists()
