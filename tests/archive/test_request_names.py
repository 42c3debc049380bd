"""The names of requests in a server's log."""

from __future__ import annotations

import uuid

from loadgen.archive.request_names import RequestNames

OWN = "332a2d18-cc10-5642-ae12-db53452f119e"  # uuid5(uuid5(NAMESPACE_URL, "run"), "102")


def test_a_name_leads_to_the_request_and_no_other_run_shares_it():
    names = RequestNames("run", 103)
    assert names.request_id(OWN) == 102
    assert RequestNames("run", 102).request_id(OWN) is None
    assert RequestNames("run2", 103).request_id(OWN) is None
    assert uuid.UUID(OWN).version == 5


def test_the_sentences_of_an_engine_name_the_run_and_the_number():
    said = f"waited 1.84 s: 1.61 s behind {OWN} (16 prompt tokens), 0.2 s behind {uuid.UUID(int=7)}"
    shown = said.replace(OWN, "run-102")
    assert RequestNames("run", 103).readable(said) == shown
