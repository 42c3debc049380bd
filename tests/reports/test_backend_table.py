"""The table of addresses: there where requests went to several, in the terminal and on the page."""

import io
from dataclasses import replace

from rich.console import Console

from loadgen.measure.aggregate import summarize
from reports.run import tables
from reports.run.console import table
from tests.runs import measured_run


def summary(n_addresses):
    run = measured_run()
    run.request_rows["remote_id"] = 1 + run.request_rows["request_id"] % n_addresses
    remotes = ("", *(f"10.0.0.{k}:8000" for k in range(1, n_addresses + 1)))
    return summarize(replace(run, names=replace(run.names, remotes=remotes)))


def printed(found):
    out = io.StringIO()
    Console(file=out, width=120).print(table(found))
    return out.getvalue()


def test_several_addresses_have_a_row_each():
    found = summary(2)
    rows = [[cell.text for cell in row] for row in tables.backend_rows(found)]
    assert [row[:3] for row in rows] == [
        ["10.0.0.1:8000", "100", "50 %"], ["10.0.0.2:8000", "100", "50 %"],
    ]  # fmt: skip
    assert "10.0.0.2:8000" in printed(found)


def test_one_address_has_no_table():
    assert tables.backend_rows(summary(1)) == []
    assert "10.0.0.1" not in printed(summary(1))
