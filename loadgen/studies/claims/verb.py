"""The verb claims."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from loadgen.cli import parse
from loadgen.cli.exit_codes import INTERRUPTED, NO_VERDICT
from loadgen.cli.flags import Confidence, StudyFlags, with_flags
from loadgen.cli.terminal import stderr
from loadgen.studies.claims.claim import SEED, SEEDS

verbs = typer.Typer()


@verbs.command(
    epilog="Example: slobench claims --only static-padding --only smdp-stairs",
)
@with_flags
def claims(
    study: StudyFlags,
    only: Annotated[
        list[str] | None,
        typer.Option(help="The key of a claim, as in claims.json; repeatable. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = SEED,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each simulated number.")] = SEEDS,
    repeats: Annotated[
        int,
        typer.Option(
            min=0,
            help="Measure again with so many sets of other seeds, and count the numbers inside "
            "their intervals.",
        ),
    ] = 0,
    workers: Annotated[
        str, typer.Option(help="Simulating processes, or auto: one per core.")
    ] = "auto",
    confidence: Confidence = None,
) -> None:
    """Measure published claims about batching again, and print them next to our numbers.

    Exit code 3 if a statement of the table is contradicted, or a number is missing.
    """
    from loadgen.run.cores import affine_cores
    from loadgen.studies.claims.catalog import chosen
    from loadgen.studies.claims.page import render
    from loadgen.studies.claims.run import CLAIMS_STUDY, ClaimsSpec, measure
    from loadgen.studies.claims.view import lines, markdown
    from loadgen.studies.study import end

    spec = ClaimsSpec(
        claims=chosen(only),
        seed=seed,
        n_seeds=seeds,
        n_sets=1 + repeats,
        confidence=parse.read_confidence(confidence) or 0.95,
        n_workers=parse.read_workers(workers) or affine_cores(),
        command=parse.base_options(None).command,
    )
    with CLAIMS_STUDY.opened("", study.out, resume=study.resume, command=spec.command) as place:
        result, was_interrupted = measure(spec, place.directory, stderr())
        place.write(result)
        place.write_text("claims.md", markdown(result))
        place.write_text("claims.html", render(result, parse.cache_dir(os.environ)))
        if was_interrupted:
            done = f"{len(result.rows) - len(result.unfinished)} of {len(result.rows)} claims"
            place.print_interrupted(stderr(), done)
            raise typer.Exit(INTERRUPTED)
    end(
        result.to_json(),
        lambda: "\n".join(lines(result)),
        as_json=study.json,
        exit_code=NO_VERDICT if result.contradicted or result.unfinished else 0,
        files={"table": place.directory / "claims.md", "report": place.directory / "claims.html"},
    )
