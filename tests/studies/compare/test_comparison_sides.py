"""What may stand as a side of `slobench compare`, and what is said of what may not."""

import msgspec
import pytest

from loadgen.errors import UsageError
from loadgen.studies.compare.comparable import refusal
from loadgen.studies.compare.sides import read_side
from loadgen.studies.nightly.measuring import CellProgress
from tests.runs import MANIFEST


@pytest.fixture
def store(tmp_path):
    cell = tmp_path / "baseline" / "chat-1f2e3d4c"
    (cell / "nights").mkdir(parents=True)
    (cell / "key.json").write_text("{}")
    (cell / "nights" / "20260101.json").write_text("{}")
    return tmp_path / "baseline"


@pytest.mark.parametrize("inside", ["", "chat-1f2e3d4c", "chat-1f2e3d4c/nights",
                                    "chat-1f2e3d4c/nights/20260101.json"])  # fmt: skip
def test_a_stored_night_has_no_requests_and_the_night_itself_is_named_instead(store, inside):
    with pytest.raises(UsageError, match=r"nightly baseline, .* name the cells of two nights"):
        read_side(str(store / inside))


def test_a_folder_of_folders_of_runs_names_them(tmp_path):
    for cell in ("rag", "chat"):
        (tmp_path / cell / "r1").mkdir(parents=True)
        (tmp_path / cell / "r1" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="its runs are one folder deeper; name one of: chat, rag"):
        read_side(str(tmp_path))
    with pytest.raises(UsageError, match="neither a run directory nor a folder of runs"):
        read_side(str(tmp_path / "nowhere"))


def test_a_replay_that_kept_less_of_a_traces_sharing_is_refused():
    exact = msgspec.structs.replace(MANIFEST, prompt_sharing="exact")
    assert refusal([MANIFEST], [MANIFEST]) == refusal([exact], [exact]) == []
    (line,) = refusal([MANIFEST], [exact])
    assert line.startswith("prompt_sharing: A has ")
    assert "exact" in line
    progress = CellProgress(manifest=exact)
    assert progress.factor()["prompt_sharing"] == "exact"
    assert "prompt_sharing" not in CellProgress(manifest=MANIFEST).factor()
